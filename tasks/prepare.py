"""The stages before the first update."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="prepare policy", task_run_name="prepare policy", cache_policy=NO_CACHE)
def prepare_policy(run: TrainingRun) -> dict[str, Any]:
    """Warm start and publish the first policy, or restore the newest checkpoint."""
    ready: dict[str, Any] = run.command("prepare")
    run.ledger.set_stage_metrics(run.run_id, "prepare", {k: v for k, v in ready.items() if isinstance(v, float)})
    return ready


@task(name="pretrain value", task_run_name="pretrain value", cache_policy=NO_CACHE)
def pretrain_value(run: TrainingRun) -> dict[str, float]:
    """Have rollouts of the initial policy made, and train the critic on them."""
    run.issuer.value_pretraining()
    metrics: dict[str, float] = run.command("pretrain_value", meanwhile=run.issuer.value_pretraining)
    run.ledger.set_stage_metrics(run.run_id, "value_pretraining", metrics)
    return metrics
