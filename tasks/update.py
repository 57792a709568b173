"""One update, as two tasks: the value model first, since its values are used by the policy's update."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="update value", task_run_name="update value {step}", cache_policy=NO_CACHE)
def update_value(run: TrainingRun, step: int) -> dict[str, float]:
    """Claim the batch of this step and make the K critic updates. Asking again for a committed step does nothing."""
    return run.command("update_value", step=step)


@task(name="update policy", task_run_name="update policy {step}", cache_policy=NO_CACHE)
def update_policy(run: TrainingRun, step: int) -> dict[str, float]:
    """One policy update on the same batch, committed and published; then more rollouts may be issued."""
    metrics = run.command("update_policy", step=step)
    run.issuer.fill()
    return metrics
