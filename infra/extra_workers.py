"""Rollout workers that join a run from anywhere: a second machine, a GPU box for the night.

They meet the run only in ledger and object store, and stay until it ends. When the run is resumed they start again,
since what they lease in the name of an earlier attempt is fenced off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict

from infra.ledger import Ledger, RunStatus
from infra.processes import ChildGroup
from infra.settings import Settings
from infra.training_run import CONFIG_ERROR, cpu_threads
from sao_core.config import ConfigError, parse_config

LOOK_EVERY_S = 1.0


class ExtraWorkers:
    """``workers`` rollout worker processes for a run that another process trains."""

    def __init__(
        self, settings: Settings, ledger: Ledger, run_id: str, workers: int, say: Callable[[str], None]
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be 1 or more: got {workers}")
        run = ledger.run(run_id)
        if run.config.get("evaluation", {}).get("alone"):
            raise ConfigError(
                f"run {run_id} is an evaluation, to which nothing can be added: raise its rollout.workers instead"
            )
        if run.status is not RunStatus.RUNNING:
            raise ConfigError(
                f"run {run_id} is {run.status} and needs no rollouts; go on with it by: sao train --resume {run_id}"
            )
        self._settings = settings
        self._ledger = ledger
        self._run_id = run_id
        self._workers = workers
        self._say = say
        self._stop = threading.Event()
        self._stop_reason = ""

    def request_stop(self, reason: str, *, paused: bool = False) -> None:
        """Ask :meth:`serve` to return; safe from any thread. Paused or cancelled is the same here."""
        self._stop_reason = self._stop_reason or reason
        self._stop.set()

    def serve(self) -> str:
        """Work until the run ends, or until asked to stop; returns which.

        Raises:
            ChildFailed: a worker died more often than ``rollout.restarts`` allows.
        """
        while not self._stop.is_set():
            run = self._ledger.run(self._run_id)
            if run.status is not RunStatus.RUNNING:
                return f"run {self._run_id} is {run.status}"
            self._serve_attempt(run.attempt)
        return self._stop_reason

    def _serve_attempt(self, attempt: int) -> None:
        config = parse_config(self._ledger.run(self._run_id).config)
        threads = config.rollout.threads or max(1, cpu_threads(config)[0] // self._workers)
        children = ChildGroup(self._settings.logs(self._run_id))
        for index in range(self._workers):
            children.start(
                f"extra-{os.getpid()}-{index}",
                "infra.roles:rollout_worker",
                {
                    "run_id": self._run_id,
                    "attempt": attempt,
                    "settings": asdict(self._settings),
                    "config": config.model_dump(mode="json"),
                    "threads": threads,
                },
                threads=threads,
                restarts=config.rollout.restarts,
                fatal=(CONFIG_ERROR,),
            )
        self._say(f"{self._workers} rollout workers serve attempt {attempt} of {self._run_id}")
        try:
            while not self._stop.is_set():
                children.watch(LOOK_EVERY_S)
                run = self._ledger.run(self._run_id)
                if run.status is not RunStatus.RUNNING or run.attempt != attempt:
                    return
        finally:
            children.close()
