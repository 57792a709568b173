"""One update: the value model first, since its fresh values are used by the policy's."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="update", task_run_name="update {step}", cache_policy=NO_CACHE)
def update(run: TrainingRun, step: int) -> bool:
    """Claim a batch, make K critic updates and one policy update on it, commit and publish.

    While the learner is busy, issue the rollouts that the last publication released (and what takes the place of those
    that came to nothing), and write down evaluations that are done. One task run an update, since each costs the
    Prefect server tens of milliseconds. Asking again for a committed step does nothing. False if the tasks are over, so
    that there is no such step; a truth value, since a flow run keeps the state behind any other result until it ends.
    """

    def catch_up() -> None:
        run.issuer.fill()
        run.evaluations.collect()

    if not run.command("update_value", alongside=catch_up, meanwhile=run.issuer.fill, step=step):
        return False
    run.command("update_policy", step=step)
    return True
