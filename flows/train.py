"""The training run: warm start → value pretraining → asynchronous updates with evaluations → report."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.supervision import supervised
from infra.training_run import TrainingRun
from sao_core.config import TrainConfig
from tasks.evaluate import finish_evaluations, request_evaluation
from tasks.prepare import prepare_policy, pretrain_value
from tasks.report import report
from tasks.update import update


@flow(name="train", flow_run_name="train {run_id}")
def train(config: TrainConfig, run_id: str) -> State:
    """Train an agent policy with SAO, or resume the run of this name from its newest checkpoint."""
    with supervised(config, run_id) as supervision:
        run = supervision.run
        ready = prepare_policy(run)
        if ready["step"] == 0:
            request_evaluation(run, 0)
            if run.config.critic.pretrain.rollouts and not ready["critic_pretrained"]:
                pretrain_value(run)
        update_loop(run, first=ready["step"] + 1)
        finish_evaluations(run)
        report(run)
    return supervision.final_state()


def update_loop(run: TrainingRun, first: int) -> None:
    """Every step: K critic updates, one policy update; evaluation runs beside it."""
    every, last = run.config.evaluation.every, run.config.learner.updates
    run.command("begin_updates", alongside=run.issuer.fill)
    for step in range(first, last + 1):
        update(run, step)
        if step == last or (every and step % every == 0):
            request_evaluation(run, step)
