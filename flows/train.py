"""The training run: warm start → value pretraining → asynchronous updates with evaluations → report."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.recipes import override_config
from flows.supervision import supervised
from infra.ledger import Ledger
from infra.settings import Settings
from infra.training_run import TrainingRun
from sao_core.config import TrainConfig
from tasks.evaluate import finish_evaluations, request_evaluation
from tasks.prepare import prepare_policy, pretrain_value
from tasks.report import report
from tasks.update import update


@flow(name="train")
def train(config: TrainConfig, run_id: str | None = None) -> State:
    """Train an agent policy with SAO.

    Args:
        config: What to train, on what, and how.
        run_id: A name for the run; leave it empty for one by recipe and time. To go on with a run, use `resume`.
    """
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
    """Every step: K critic updates, one policy update; evaluation runs beside it, and once more at the end."""
    every, last = run.config.evaluation.every, run.config.learner.updates
    run.command("begin_updates", alongside=run.issuer.fill)
    step = first - 1
    while step < last and update(run, step + 1):
        step += 1
        if every and step % every == 0 and step < last:
            request_evaluation(run, step)
    if step < last:
        run.say(f"all tasks have been asked as often as they should be: {step} updates instead of {last}")
    request_evaluation(run, step)


@flow(name="resume")
def resume(run_id: str, changes: list[str] = []) -> State:  # noqa: B006  Prefect shows the default in its form
    """Go on with a run from its newest checkpoint, after it was cancelled, failed or interrupted.

    Args:
        run_id: The run, as `sao runs` lists it.
        changes: Settings to change, e.g. `learner.updates=160`; what may change is pace, learning rates and counts.
    """
    stored = Ledger(Settings.from_environment().database_url).run(run_id).config
    state: State = train.fn(override_config(stored, changes), run_id)
    return state
