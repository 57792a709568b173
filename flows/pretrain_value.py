"""Value pretraining alone: rollouts of a policy → a critic that belongs with it, kept as the checkpoint of step 0."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.supervision import supervised
from sao_core.config import TrainConfig
from tasks.prepare import prepare_policy, pretrain_value


@flow(name="pretrain-value")
def pretrain_value_model(config: TrainConfig, run_id: str | None = None) -> State:
    """Train the critic on rollouts of the initial policy; `sao export` then gives both, `--resume` trains on.

    Args:
        config: The model, the tasks and the critic.
        run_id: A name for the run; leave it empty for one by recipe and time.
    """
    with supervised(config, run_id) as supervision:
        run = supervision.run
        prepare_policy(run)
        pretrain_value(run)
        run.command("begin_updates")
    return supervision.final_state()
