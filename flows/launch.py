"""From a command line to a finished run: checks, a Prefect server, the flow, and an exit code from the ledger.

Prefect is imported only after its server's address is set; the run's result never depends on that server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from flows.display import LiveProgress, print_result
from infra.attempts import wait_for_learner
from infra.ledger import Ledger, RunStatus
from infra.processes import ChildFailed
from infra.services import prefect_environment, prefect_server
from infra.settings import Settings
from infra.training_run import CONFIG_ERROR
from sao_core.algorithms import describe_objective, resolve
from sao_core.config import TrainConfig

DRAIN_S = 3.0


def train_here(config: TrainConfig, settings: Settings, run_id: str, console: Console) -> NoReturn:
    """Run the training flow in this process, showing progress; exits with 0 (completed) or 1.

    Raises:
        RunAlive: another process trains this run.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(settings.database_url)
    wait_for_learner(ledger, run_id, console.print)
    objective = describe_objective(resolve(config), config.algorithm)
    console.print(f"run {run_id} · {config.algorithm.name} {objective} · state in {settings.home}", highlight=False)
    with prefect_here(settings, console):
        with LiveProgress(ledger, run_id, console):
            error = run_flow("flows.train:train", config, settings, run_id)
        leave(_conclude(ledger, settings, run_id, error, console))


@contextmanager
def prefect_here(settings: Settings, console: Console) -> Iterator[None]:
    """A Prefect server for the flows of this process: the configured one, or a local one while the context lasts."""
    if settings.prefect_api_url is not None:
        os.environ.update(prefect_environment(settings, None))
        yield
        return
    with console.status("starting the Prefect server …"):
        server = prefect_server(settings)
    with server:
        os.environ.update(prefect_environment(settings, server))
        yield


def run_flow(flow: str, config: TrainConfig, settings: Settings, run_id: str) -> BaseException | None:
    """Run ``module:flow`` to its end; returns what it failed with, or what Prefect did after the work was done."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    _log_to_file(settings.logs(run_id))
    signal.signal(signal.SIGTERM, interrupt)
    module, _, name = flow.partition(":")
    try:
        state = getattr(import_module(module), name)(config=config, run_id=run_id, return_state=True)
        failure = state.result(raise_on_failure=False)
    except (Exception, KeyboardInterrupt) as error:
        return error
    return failure if isinstance(failure, BaseException) else None


def explain_failure(settings: Settings, run_id: str, error: BaseException | None, said: str | None) -> tuple[str, int]:
    """Why a run failed, for people, and the exit code: 2 if a process of it found the input wrong."""
    if isinstance(error, ChildFailed) and error.kind == CONFIG_ERROR:
        return f"error: {error.summary.partition('ConfigError: ')[2]}", 2
    reason = f"{error.name} {error.summary}" if isinstance(error, ChildFailed) else str(error or said)
    return f"failed: {reason}\nlogs: {settings.logs(run_id)}", 1


def _conclude(ledger: Ledger, settings: Settings, run_id: str, error: BaseException | None, console: Console) -> int:
    """Say how the run ended, by the ledger; returns the exit code."""
    run = ledger.run(run_id) if ledger.has_run(run_id) else None
    if run is not None and run.status is RunStatus.COMPLETED:
        print_result(ledger, settings, run_id, console)
        return 0
    if run is not None and run.status is RunStatus.CANCELLED:
        console.print(stopped_message(ledger, run_id), highlight=False, soft_wrap=True)
        return 1
    text, code = explain_failure(settings, run_id, error, run.message if run else None)
    if code == 2:
        sys.stderr.write(f"{text}\n")
        return code
    console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    if run is not None:
        console.print(f"continue with: sao train --resume {run_id}", highlight=False, soft_wrap=True)
    return code


def stopped_message(ledger: Ledger, run_id: str) -> str:
    """What a stopped run kept, and how to go on."""
    checkpoint = ledger.latest_checkpoint(run_id)
    kept = f"with the checkpoint of step {checkpoint.step}" if checkpoint else "before its first checkpoint"
    return f"stopped {kept}. Continue with: sao train --resume {run_id}"


def _log_to_file(folder: Path) -> None:
    """Log to ``flow.log``, not over the progress display; Prefect leaves a root logger alone that is set up already."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(filename=folder / "flow.log", format=layout, level=logging.INFO, force=True)
    logging.raiseExceptions = False  # what a full disk refuses to log is not for the terminal
    logging.getLogger("httpx").setLevel(logging.WARNING)


def leave(code: int) -> NoReturn:
    """Give Prefect's background queues a moment, then go: with a dead server they would hold the process for hours."""
    sys.stdout.flush()
    for module, name in (("prefect.events.worker", "EventsWorker"), ("prefect.logging.handlers", "APILogWorker")):
        with suppress(Exception):
            worker: Any = getattr(sys.modules[module], name)
            worker.drain_all(timeout=DRAIN_S)
    os._exit(code)
