"""More rollout workers for a run that is being trained, on whatever machine this flow is started."""

from __future__ import annotations

import logging
from typing import Annotated

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Completed
from pydantic import Field

from flows.supervision import watch_own_state
from infra.extra_workers import ExtraWorkers
from infra.ledger import Ledger
from infra.settings import Settings

logger = logging.getLogger(__name__)


@flow(name="rollout")
def rollout(run_id: str, workers: Annotated[int, Field(ge=1)] = 1) -> State:
    """Make rollouts for a running training until it ends.

    Args:
        run_id: The run, as `sao runs` lists it.
        workers: Worker processes to add; each holds the policy once.
    """
    settings = Settings.from_environment()
    crew = ExtraWorkers(settings, Ledger(settings.database_url), run_id, workers, logger.info)
    with watch_own_state(f"rollouts for {run_id}", crew.request_stop):
        try:
            return Completed(message=crew.serve())
        except (TerminationSignal, KeyboardInterrupt, SystemExit):
            return Cancelled(message="Stopped; the run goes on without these workers")
