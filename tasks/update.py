"""One update: the value model first, since its fresh values are used by the policy's."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="update", task_run_name="update {step}", cache_policy=NO_CACHE)
def update(run: TrainingRun, step: int) -> dict[str, float]:
    """Claim a batch, make K critic updates and one policy update on it, commit, publish; then issue more rollouts.

    One task run an update, since each costs the Prefect server tens of milliseconds. Asking again for a committed step
    does nothing.
    """
    run.command("update_value", step=step)
    metrics: dict[str, float] = run.command("update_policy", step=step)
    run.issuer.fill()
    return metrics
