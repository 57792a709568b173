"""A training run as its flow sees it: whom to command, what to watch, when to stop. It never computes.

flow ── command ─▶ learner                     both meet only in ledger and object store
     ── issue ───▶ ledger.requests ─ lease ─▶ rollout workers, evaluator
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from infra.attempts import EVALUATOR, LEARNER, is_gone
from infra.evaluations import EvaluationDesk
from infra.ledger import Ledger
from infra.processes import CLOSE_GRACE_S, ChildGroup
from infra.prompts import PromptIssuer
from infra.settings import Settings
from infra.tracking import Tracker
from sao_core.algorithms import resolve
from sao_core.config import ConfigError, TrainConfig
from sao_core.trajectory import Purpose

CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__qualname__}"
WATCHDOG_POLL_S = 2.0


class StopRequested(Exception):
    """The run was asked to stop; the message says by what."""


class NoProgress(RuntimeError):
    """Nothing happened for longer than ``asynchrony.watchdog_s``."""


def new_run_id(recipe: str) -> str:
    """A name that sorts by time and does not collide."""
    return f"{recipe}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def cpu_threads(config: TrainConfig) -> tuple[int, int, int]:
    """Threads of (learner alone, learner beside workers, each worker); asynchronous ones share the cores."""
    cores = len(os.sched_getaffinity(0))
    workers = config.rollout.workers
    if config.evaluation.alone:
        each = config.rollout.threads or max(1, cores // workers)
        return each, each, each
    per_worker = max(1, cores // (workers + 1)) if config.asynchrony.enabled else cores
    beside = max(1, cores - workers * per_worker) if config.asynchrony.enabled else cores
    alone = config.learner.threads or cores
    return alone, config.learner.threads or beside, config.rollout.threads or per_worker


class TrainingRun:
    """Holds the children of a run until :meth:`close`; ``model`` is the folder behind ``model.path``, if it differs."""

    def __init__(
        self,
        config: TrainConfig,
        settings: Settings,
        ledger: Ledger,
        run_id: str,
        attempt: int,
        say: Callable[[str], None],
        model: str | None = None,
    ) -> None:
        self.config = config
        self.settings = settings
        self.run_id = run_id
        self.attempt = attempt
        self.say = say
        self._model = config.model.path if model is None else model
        self.ledger = ledger
        self.algorithm = resolve(config)
        self.issuer = PromptIssuer(self.ledger, run_id, config)
        self.evaluations = EvaluationDesk(self.ledger, run_id, config)
        self.children = ChildGroup(settings.logs(run_id))
        self.tracker = Tracker(self.ledger, run_id, settings, config) if config.tracking.enabled else None
        self._stop_reason: str | None = None
        self._stop = threading.Event()
        self._closed = threading.Event()
        self.paused = False
        self._last_news = time.monotonic()
        self._last_look = 0.0
        self._seen: object = None
        self._buried: set[str] = set()

    def start(self) -> None:
        """Start learner, evaluator and rollout workers (evaluation alone: evaluators); returns before they are up."""
        alone, beside_workers, per_worker = cpu_threads(self.config)
        config = self.config.model_copy(update={"model": self.config.model.model_copy(update={"path": self._model})})
        common = {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "settings": asdict(self.settings),
            "config": config.model_dump(mode="json"),
        }
        learner = common | {"threads": (alone, beside_workers)}
        worker = common | {"threads": per_worker}
        if not config.evaluation.alone:
            self.children.start(LEARNER, "infra.roles:learner", learner, when_orphaned="stop")
        for name, target in self._workers().items():
            self.children.start(
                name, target, worker, threads=per_worker, restarts=self.config.rollout.restarts, fatal=(CONFIG_ERROR,)
            )
        if self.tracker is not None:
            self.tracker.start()

    def _workers(self) -> dict[str, str]:
        """Name of a process that makes rollouts → its role."""
        count = self.config.rollout.workers
        if self.config.evaluation.alone:
            more = {f"{EVALUATOR}-{index}": "infra.roles:evaluator" for index in range(1, count)}
            return {EVALUATOR: "infra.roles:lone_evaluator", **more}
        rollouts = {f"rollout-{index}": "infra.roles:rollout_worker" for index in range(count)}
        return {**rollouts, EVALUATOR: "infra.roles:evaluator"}

    def command(
        self,
        verb: str,
        *,
        alongside: Callable[[], object] | None = None,
        meanwhile: Callable[[], object] | None = None,
        **payload: Any,
    ) -> Any:
        """Have the learner do something and return its report; raises what went wrong anywhere in the run.

        ``alongside`` is called once, as soon as the learner has its command; ``meanwhile`` every few seconds until the
        report is there.
        """
        report = self.children.command(
            LEARNER, verb, payload, alongside=alongside, on_wait=lambda: self.check(meanwhile)
        )
        self._last_news = time.monotonic()
        if self.tracker is not None:
            self.tracker.poke()
        return report

    def wait(self, done: Callable[[], bool], what: str, poll_s: float = 0.1) -> None:
        """Wait until ``done()``; raises what went wrong anywhere in the run."""
        self.say(what)
        while not done():
            self.children.watch(timeout_s=poll_s)
            self.check()

    def watch(self, name: str) -> None:
        """Return when the run has closed; to be called from a thread of its own.

        Raises:
            ChildFailed: this child failed.
        """
        self._closed.wait()
        self.children.join(name)

    def request_stop(self, reason: str, *, paused: bool = False) -> None:
        """Ask the flow to stop at its next look, for good or to be resumed in the UI; safe from any thread."""
        if not self._stop.is_set():
            self._stop_reason, self.paused = reason, paused
        self._stop.set()

    @property
    def stop_reason(self) -> str | None:
        """Why the run was asked to stop, if it was."""
        return self._stop_reason

    def check(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Raise :class:`StopRequested` or :class:`NoProgress` if it is time; every few seconds do ``meanwhile`` too."""
        if self._stop.is_set():
            raise StopRequested(self._stop_reason)
        now = time.monotonic()
        if now - self._last_look < WATCHDOG_POLL_S:
            return
        self._last_look = now
        if meanwhile is not None:
            meanwhile()
        self._bury_the_dead()
        states = {name: self.children.progress(name).get("state") for name in self.children.alive()}
        seen = (states, self.ledger.progress(self.run_id))
        if seen != self._seen:
            self._seen, self._last_news = seen, now
        if now - self._last_news > self.config.asynchrony.watchdog_s:
            if self.config.evaluation.alone:
                asked = self.ledger.request_states(self.run_id, Purpose.EVALUATE)
                name, rollouts = EVALUATOR, f"evaluation rollouts: { {str(state): n for state, n in asked.items()} }"
            else:
                name, rollouts = LEARNER, f"training rollouts: {self.ledger.queue(self.run_id)}"
            raise NoProgress(
                f"no progress for {self.config.asynchrony.watchdog_s:g} s (asynchrony.watchdog_s): the {name} is at "
                f"“{states.get(name)}”; {rollouts}; see {self.settings.logs(self.run_id)}"
            )

    def _bury_the_dead(self) -> None:
        """Take back at once what a killed process of this machine had leased; it will never renew it."""
        for worker in self.ledger.workers(self.run_id):
            if worker.worker not in self._buried and is_gone(worker):
                self.ledger.expire(self.run_id, worker.worker)
                self._buried.add(worker.worker)

    def close(self, status: str, error: str | None = None, grace_s: float = CLOSE_GRACE_S) -> None:
        """End all children (the learner keeps a checkpoint), write the status, send what MLflow still lacks."""
        try:
            if status == "completed":
                self.ledger.cancel_requests(self.run_id)
            killed = self.children.close(grace_s)
            if LEARNER in killed:
                self.say("the learner was killed before its checkpoint was complete; the last complete one stands")
        finally:
            self._closed.set()
            self.ledger.set_status(self.run_id, status, error or "")
            if self.tracker is not None:
                self.tracker.close(status)
