"""Upkeep of an installation, to be started by hand or on a schedule; safe beside live runs."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.checks import upkeep_json
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.upkeep import GRACE_S, Upkeep
from tasks.upkeep import (
    expire_leases,
    mark_interrupted,
    remove_local,
    remove_orphans,
    remove_superseded,
    settle_flow_runs,
)


@flow(name="upkeep", persist_result=False)
def upkeep(grace_s: float = GRACE_S, dry_run: bool = False) -> dict[str, Any]:
    """Expire leases, mark interrupted runs, and remove what nothing refers to and is older than the grace period.

    Args:
        grace_s: Seconds that an object must be old before it is removed.
        dry_run: List what would be done, and change nothing.
    """
    settings = Settings.from_environment()
    ledger = Ledger(settings.database_url)
    this_round = Upkeep(ledger, ObjectStore.from_settings(settings), settings, grace_s=grace_s, dry_run=dry_run)
    actions = [
        action
        for verb in (
            expire_leases,
            mark_interrupted,
            remove_superseded,
            remove_orphans,
            remove_local,
            settle_flow_runs,
        )
        for action in verb(this_round)
    ]
    return upkeep_json(actions, grace_s, dry_run)
