"""Promotion of a run's result, as a step of recurring training."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.ledger import Ledger
from infra.settings import Settings
from infra.tracking.client import TrackingError
from infra.tracking.promotion import PromotionRefused, promote


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE)
def promote_run(run_id: str) -> str:
    """Make the run's model the champion of its recipe, unless its evaluation is worse; returns what became of it."""
    settings = Settings.from_environment()
    try:
        return str(promote(Ledger(settings.database_url), settings, run_id, at_least=None, force=False))
    except (PromotionRefused, TrackingError) as refusal:
        return f"not promoted: {refusal}"
