"""The stages before the first update."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="prepare policy", cache_policy=NO_CACHE)
def prepare_policy(run: TrainingRun) -> dict[str, Any]:
    """Warm start and publish the first policy, or restore the newest checkpoint."""
    return run.command("prepare")


@task(name="pretrain value", cache_policy=NO_CACHE)
def pretrain_value(run: TrainingRun) -> dict[str, float]:
    """Have rollouts of the initial policy made, and train the critic on them."""
    run.issuer.value_pretraining()
    return run.command("pretrain_value")
