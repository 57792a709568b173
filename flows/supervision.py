"""What every flow that holds a training run's processes shares: the run is opened, watched and ended the same way.

A cancellation (UI, SIGTERM, Ctrl-C) ends the wait at once, leaves a checkpoint, and the run resumable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed

from infra.attempts import begin
from infra.ledger import Ledger
from infra.settings import Settings
from infra.training_run import StopRequested, TrainingRun
from sao_core.config import TrainConfig

logger = logging.getLogger(__name__)

OWN_STATE_POLL_S = 5.0


class SupervisedRun:
    """A run and how it ended."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.status = "running"

    def final_state(self) -> State:
        """The Prefect state of the flow: Completed, or Cancelled with the way to go on."""
        run_id = self.run.run_id
        if self.status == "completed":
            return Completed(message=f"{run_id} completed")
        return Cancelled(message=f"{self.run.stop_reason}. Continue with: sao train --resume {run_id}")


@contextmanager
def supervised(config: TrainConfig, run_id: str) -> Iterator[SupervisedRun]:
    """Begin a run, or resume the one of this ``run_id``, start its processes, and end them whatever happens.

    A stop request ends the body and is swallowed: ask :meth:`SupervisedRun.final_state`. An error is written to the
    ledger and raised.
    """
    settings = Settings.from_environment()
    ledger = Ledger(settings.database_url)
    attempt = begin(ledger, run_id, config, logger.info)
    ledger.set_run_links(run_id, prefect_flow_run_id=flow_run.id)
    run = TrainingRun(config, settings, ledger, run_id, attempt, say=logger.info)
    supervised_run = SupervisedRun(run)
    status, error = "failed", None
    try:
        with watch_own_state(run):
            run.start()
            yield supervised_run
        status = "completed"
    except (StopRequested, TerminationSignal, KeyboardInterrupt, SystemExit) as signal:
        run.request_stop(str(signal) if isinstance(signal, StopRequested) else f"Stopped by {type(signal).__name__}")
        status = "cancelled"
    except Exception as failure:
        error = str(failure)
        raise
    finally:
        run.close(status, error)
        supervised_run.status = status


@contextmanager
def watch_own_state(run: TrainingRun) -> Iterator[None]:
    """Poll this flow run's state: gives runs started from a shell a cancel button, and outlives a dead observer."""
    api_url, own_id, done = PREFECT_API_URL.value(), flow_run.id, threading.Event()

    def poll() -> None:
        with httpx.Client(timeout=3.0) as client:
            while not done.wait(OWN_STATE_POLL_S):
                with suppress(httpx.HTTPError, ValueError, KeyError):
                    state = client.get(f"{api_url}/flow_runs/{own_id}").json()["state"]["type"]
                    if state in ("CANCELLING", "CANCELLED"):
                        run.request_stop("Cancelled in the Prefect UI")

    if api_url and own_id:
        threading.Thread(target=poll, name="own-state", daemon=True).start()
    try:
        yield
    finally:
        done.set()
