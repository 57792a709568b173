"""What every flow that holds a training run's processes shares: the run is opened, watched and ended the same way.

A cancellation or pause (UI, SIGTERM, Ctrl-C) ends the wait at once, leaves a checkpoint, and the run resumable.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import httpx
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed, Suspended

from flows.preflight import preflight
from flows.run_page import RunPage
from infra.allocator import keep_lean
from infra.attempts import begin
from infra.ledger import Ledger
from infra.processes import ChildFailed
from infra.settings import Settings
from infra.training_run import StopRequested, TrainingRun, new_run_id
from sao_core.config import TrainConfig
from tasks.rollout import evaluator, rollout_worker

logger = logging.getLogger(__name__)

STOPS = (StopRequested, TerminationSignal, Pause, KeyboardInterrupt, SystemExit)
"""What ends a flow's body without being a failure."""
OWN_STATE_POLL_S = 5.0
LEAVE_WITHIN_S = 150.0
"""A flow whose work is done leaves by then, even if Prefect's queues wait for a server that is gone for good."""


class SupervisedRun:
    """A run and how it ended."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.status = "running"
        self.error: BaseException | None = None

    def final_state(self) -> State:
        """The Prefect state of the flow, with the reason and the way to go on as its message.

        Raises:
            Pause: the run was paused; Prefect's own way to leave a flow run that a worker will take up again.
        """
        verb = "evaluate" if self.run.config.evaluation.alone else "train"
        go_on = f"Continue with: sao {verb} --resume {self.run.run_id}"
        if self.status == "completed":
            return Completed(message=f"{self.run.run_id} completed")
        if self.status == "failed":
            return Failed(message=f"{reason(self.error)}. {go_on}", data=self.error)
        if self.run.paused and _started_by_a_worker():
            raise Pause(state=Suspended())
        return Cancelled(message=f"{self.run.stop_reason}. {go_on}")


def reason(error: BaseException | None) -> str:
    """Why a run failed, in a line."""
    if isinstance(error, ChildFailed):
        return f"{error.name} {error.summary}".rstrip(".")
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


@contextmanager
def supervised(config: TrainConfig, run_id: str | None = None, *, training: bool = True) -> Iterator[SupervisedRun]:
    """Begin a run, or resume the one of this ``run_id``, start its processes, and end them whatever happens.

    Without ``training`` the run is an evaluation alone: it has no learner and no rollout workers.

    Without a ``run_id`` it is the run that this flow run has begun before, if it has: Prefect may start a flow run
    again (Retry, Resume). What ends the body is swallowed: ask :meth:`SupervisedRun.final_state`.

    Raises:
        ConfigError: the run cannot begin as configured; then nothing was made.
    """
    for package in ("flows", "tasks", "infra"):  # Prefect shows what they say on the run's page
        logging.getLogger(package).setLevel(logging.INFO)
    keep_lean()
    settings = Settings.from_environment()
    ledger = Ledger(settings.database_url)
    run_id = run_id or ledger.run_of_flow_run(flow_run.id) or new_run_id(config.recipe)
    model = preflight(config, settings, resuming=has_weights(ledger, run_id, training=training), training=training)
    attempt = begin(ledger, run_id, config, logger.info)
    ledger.set_run_links(run_id, prefect_flow_run_id=flow_run.id)
    run = TrainingRun(config, settings, ledger, run_id, attempt, say=logger.info, model=model)
    supervised_run = SupervisedRun(run)
    page = RunPage(ledger, settings, run_id)
    status = "failed"
    try:
        with watch_own_state(run_id, run.request_stop), page:
            run.start()
            rollouts = [rollout_worker.submit(run, index) for index in range(config.rollout.workers) if training]
            watched = [*rollouts, evaluator.submit(run)]
            try:
                yield supervised_run
                status = "completed"
            except (*STOPS, Exception) as ended:
                stop = stop_behind(ended)
                if stop is None:
                    supervised_run.error = ended
                else:
                    run.request_stop("Stopped", paused=isinstance(stop, Pause))  # unless it has been asked before
                    status = "cancelled"
            finally:
                run.close(status, reason(supervised_run.error) if status == "failed" else None)
                supervised_run.status = status
                for future in watched:
                    future.wait(1.0)
    finally:
        if _started_by_a_worker():
            threading.Thread(target=_leave_in_time, args=(status,), name="leave", daemon=True).start()


def stop_behind(ended: BaseException | None) -> BaseException | None:
    """The stop that ended a flow's body, itself or behind what Prefect made of it; None if there was none.

    A signal that comes while Prefect begins a task run reaches the body as a ValueError that was raised on its way.
    """
    while ended is not None and not isinstance(ended, STOPS):
        ended = ended.__context__
    return ended


def has_weights(ledger: Ledger, run_id: str, *, training: bool) -> bool:
    """Whether a run can go on without the model that it begins with; an evaluation alone has it once it is stored."""
    return ledger.has_run(run_id) and (training or ledger.newest_policy(run_id) is not None)


def _started_by_a_worker() -> bool:
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def _leave_in_time(status: str) -> None:
    time.sleep(LEAVE_WITHIN_S)
    os._exit(0 if status == "completed" else 1)


class StopRequest(Protocol):
    """Asks a run to stop, for good or to be resumed in the UI."""

    def __call__(self, reason: str, *, paused: bool = False) -> None:
        """Ask; from any thread, any number of times."""


@contextmanager
def watch_own_state(name: str, request_stop: StopRequest) -> Iterator[None]:
    """Give this flow run a name, and poll its state.

    It gives runs started from a shell a cancel button, and outlives Prefect's own observer, which one outage ends.
    """
    api_url, own_id, done = PREFECT_API_URL.value(), flow_run.id, threading.Event()

    def watch() -> None:
        secret = PREFECT_API_AUTH_STRING.value()
        user, _, password = (secret or "").partition(":")
        with httpx.Client(timeout=3.0, auth=(user, password) if secret else None) as client:
            with suppress(httpx.HTTPError):
                client.patch(f"{api_url}/flow_runs/{own_id}", json={"name": name})
            while not done.wait(OWN_STATE_POLL_S):
                with suppress(httpx.HTTPError, ValueError, KeyError):
                    state = client.get(f"{api_url}/flow_runs/{own_id}").json()["state"]["type"]
                    if state in ("CANCELLING", "CANCELLED"):
                        request_stop("Cancelled in the Prefect UI")
                    elif state == "PAUSED":
                        request_stop("Paused in the Prefect UI", paused=True)

    if api_url and own_id:
        threading.Thread(target=watch, name="own-state", daemon=True).start()
    try:
        yield
    finally:
        done.set()
