"""Beginning an attempt of a run: the first, or a resume with a configuration that may follow what was seen.

One attempt at a time: a resume waits for a learner that is still keeping its checkpoint, and refuses to push out one
that trains (of an evaluation that stands alone: its evaluators).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import psutil

from infra.ledger import Ledger, WorkerRecord
from sao_core.changes import Change, changes
from sao_core.config import ConfigError, TrainConfig, parse_config

LEARNER = "learner"
EVALUATOR = "evaluator"
STOPPING = "stopping"
"""What a learner says that was told to stop and keeps its checkpoint."""
ENDED = ("stopped", "failed")
SILENT_S = 20.0
"""A learner on another machine that has said nothing for this long is gone."""
PATIENCE_S = 10.0
"""How long a learner may take to hear that its flow is gone; it says so with its next heartbeat."""
STOPPING_PATIENCE_S = 120.0


class RunAlive(ConfigError):
    """The run is being trained by another process."""


def planned_changes(ledger: Ledger, run_id: str, config: TrainConfig) -> list[Change]:
    """What a resume with ``config`` would change.

    Raises:
        UnknownRun: there is no such run.
        ConfigError: something would change that a resumed run keeps.
    """
    return changes(parse_config(ledger.run(run_id).config), config)


def begin(ledger: Ledger, run_id: str, config: TrainConfig, say: Callable[[str], None]) -> int:
    """Create the run, or take it up again once its last learner is gone; returns the number of this attempt.

    What ``config`` changes is said and written down.

    Raises:
        ConfigError: it would change what a resumed run keeps.
        RunAlive: another process trains it.
    """
    created = ledger.create_run(run_id, config.recipe, config.algorithm.name, config.model_dump(mode="json"))
    planned = [] if created else planned_changes(ledger, run_id, config)
    wait_for_learner(ledger, run_id, say, EVALUATOR if config.evaluation.alone else LEARNER)
    attempt = ledger.begin_attempt(run_id)
    if planned:
        changed = {change.setting: (change.old, change.new) for change in planned}
        ledger.change_config(run_id, config.model_dump(mode="json"), changed, attempt=attempt)
    for change in planned:
        say(f"changed: {change}")
    return attempt


def wait_for_learner(ledger: Ledger, run_id: str, say: Callable[[str], None], role: str = LEARNER) -> None:
    """Return once no learner of this run lives; ``role`` is who does the work where it is no learner.

    Raises:
        RunAlive: one does, and is not about to end.
    """
    started = time.monotonic()
    said = False
    while (learner := _living(ledger, run_id, role)) is not None:
        waited = time.monotonic() - started
        if waited > (STOPPING_PATIENCE_S if learner.state == STOPPING else PATIENCE_S):
            raise RunAlive(
                f"run {run_id} is being {'trained' if role == LEARNER else 'evaluated'} by process {learner.pid} on "
                f"{learner.host} ({learner.state}): stop it first, with Ctrl-C there or by cancelling it in the "
                "Prefect UI"
            )
        if not said:
            say(f"waiting for the {role} of the last attempt (process {learner.pid} on {learner.host}) to end")
            said = True
        time.sleep(0.2)


def _living(ledger: Ledger, run_id: str, role: str) -> WorkerRecord | None:
    members = (worker for worker in ledger.workers(run_id) if worker.worker.startswith(f"{role}-"))
    return next((worker for worker in members if _lives(worker)), None)


def _lives(worker: WorkerRecord) -> bool:
    return not (worker.state in ENDED or worker.silent_s > SILENT_S or is_gone(worker))


def is_gone(worker: WorkerRecord) -> bool:
    """Whether this was a process of this machine that is no more; of other machines only their silence tells."""
    return worker.host == socket.gethostname() and not _exists(worker.pid)


def _exists(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
