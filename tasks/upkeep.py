"""Upkeep: one task per kind of thing; the last one sets right what the Prefect server believes of ended runs."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

import httpx
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Crashed, Failed

from infra.ledger import Ledger, RunRecord, RunStatus
from infra.upkeep import Action, Upkeep

logger = logging.getLogger(__name__)

UNSETTLED = (StateType.RUNNING, StateType.CANCELLING, StateType.CRASHED)
"""States of a flow run that may be left over from an outage of the server."""

FLOW_RUNS_AT_ONCE = 200
PATIENCE_S = 3.0
STILL_CLOSING_S = 60.0
"""A flow of a run that ended less than this ago may be about to say so itself."""


@task(name="expire leases", task_run_name="expire leases", cache_policy=NO_CACHE)
def expire_leases(upkeep: Upkeep) -> list[Action]:
    """Take back leases that ran out."""
    return upkeep.expire_leases()


@task(name="mark interrupted runs", task_run_name="mark interrupted runs", cache_policy=NO_CACHE)
def mark_interrupted(upkeep: Upkeep) -> list[Action]:
    """Say of runs whose processes are gone that they were interrupted."""
    return upkeep.mark_interrupted()


@task(name="remove what was superseded", task_run_name="remove what was superseded", cache_policy=NO_CACHE)
def remove_superseded(upkeep: Upkeep) -> list[Action]:
    """Remove policies and checkpoints that a rewind undid."""
    return upkeep.remove_superseded()


@task(name="remove orphans", task_run_name="remove orphans", cache_policy=NO_CACHE)
def remove_orphans(upkeep: Upkeep) -> list[Action]:
    """Remove objects to which nothing refers."""
    return upkeep.remove_orphans()


@task(name="remove local leftovers", task_run_name="remove local leftovers", cache_policy=NO_CACHE)
def remove_local(upkeep: Upkeep) -> list[Action]:
    """Remove scratch folders and downloads of runs that are not alive."""
    return upkeep.remove_local()


@task(name="settle flow runs", task_run_name="settle flow runs", cache_policy=NO_CACHE)
def settle_flow_runs(upkeep: Upkeep) -> list[Action]:
    """Set flow runs right that the Prefect server takes for running or crashed."""
    return settle(upkeep.ledger, dry_run=upkeep.dry_run)


def settle(ledger: Ledger, *, dry_run: bool) -> list[Action]:
    """Set flow runs to what the ledger says of their runs; without a server that answers, that is left for later."""
    api_url = PREFECT_API_URL.value()
    if api_url is None:
        return []
    until = ledger.now() - STILL_CLOSING_S
    ended = {
        UUID(run.prefect_flow_run_id): run
        for run in ledger.runs()
        if run.prefect_flow_run_id is not None and run.ended_at is not None and run.ended_at < until
    }
    done: list[Action] = []
    ids = list(ended)
    try:
        httpx.get(f"{api_url}/health", timeout=PATIENCE_S).raise_for_status()  # the client would try for a minute
        with get_client(sync_client=True) as client:
            for start in range(0, len(ids), FLOW_RUNS_AT_ONCE):
                wanted = FlowRunFilter(
                    id=FlowRunFilterId(any_=ids[start : start + FLOW_RUNS_AT_ONCE]),
                    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNSETTLED))),
                )
                for flow_run in client.read_flow_runs(flow_run_filter=wanted, limit=FLOW_RUNS_AT_ONCE):
                    run, state = ended[flow_run.id], _state(ended[flow_run.id])
                    if flow_run.state is None or flow_run.state.type is state.type:
                        continue
                    if not dry_run:
                        client.set_flow_run_state(flow_run.id, state, force=True)
                    reason = f"the server says {flow_run.state.type.value.lower()}, the ledger says {run.status}"
                    done.append(Action("flow run", f"{flow_run.name} ({flow_run.id})", 0, reason))
    except (httpx.HTTPError, PrefectHTTPStatusError, OSError) as error:
        logger.warning("flow runs are set right another time, since the Prefect server does not answer: %s", error)
    return done


def _state(run: RunRecord) -> State[Any]:
    """How a flow run ended, by its run."""
    go_on = f"Continue with: sao train --resume {run.run_id}"
    if run.status is RunStatus.COMPLETED:
        return Completed(message=f"{run.run_id} completed")
    if run.status is RunStatus.CANCELLED:
        return Cancelled(message=f"Stopped. {go_on}")
    if run.status is RunStatus.FAILED:
        return Failed(message=f"{run.message}. {go_on}")
    return Crashed(message=f"Interrupted. {go_on}")
