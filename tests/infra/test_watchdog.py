"""The flow's view of a run: the watchdog and what it counts as progress."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from infra_fixtures import LEASE_S, TRAIN, make, policy, prompts

from infra import training_run
from infra.extra_workers import ExtraWorkers
from infra.ledger import Ledger, NewRequest
from infra.settings import Settings
from infra.training_run import NoProgress, StopRequested, TrainingRun
from sao_core.config import ConfigError, parse_config
from sao_core.trajectory import Purpose

WATCHDOG_S = 0.6


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingRun]:
    """A run whose processes were never started, so that nothing happens in it unless a test does it."""
    monkeypatch.setattr(training_run, "WATCHDOG_POLL_S", 0.0)
    settings = Settings.from_environment({}, directory=tmp_path)
    config = parse_config({"asynchrony": {"watchdog_s": WATCHDOG_S}, "tracking": {"enabled": False}})
    ledger = Ledger(settings.database_url)
    ledger.create_run("run", "tiny", "sao", config.model_dump(mode="json"))
    attempt = ledger.begin_attempt("run")
    ledger.add_policy("run", policy(0), step=0)
    run = TrainingRun(config, settings, ledger, "run", attempt, say=lambda line: None)
    yield run
    run.children.close(0.0)
    ledger.close()


def check_for(run: TrainingRun, seconds: float, meanwhile: Callable[[], object] = bool) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        run.check()
        meanwhile()
        time.sleep(0.02)


def test_a_run_without_progress_ends_with_what_was_waited_for(watched: TrainingRun) -> None:
    watched.ledger.issue("run", prompts(3))
    watched.ledger.lease("run", "w", TRAIN, 1, LEASE_S)
    with pytest.raises(NoProgress) as ended:
        check_for(watched, 20 * WATCHDOG_S)
    for part in ("0.6 s (asynchrony.watchdog_s)", "the learner is at", "'pending': 2, 'leased': 1", "logs/run"):
        assert part in str(ended.value)


def test_an_evaluation_without_progress_names_its_evaluator(watched: TrainingRun) -> None:
    watched.config = watched.config.model_copy(
        update={"evaluation": watched.config.evaluation.model_copy(update={"alone": True})}
    )
    watched.ledger.issue("run", [NewRequest(Purpose.EVALUATE, "held-out", policy_version=0)])
    with pytest.raises(NoProgress, match=r"the evaluator is at .*evaluation rollouts: \{'pending': 1\}"):
        check_for(watched, 20 * WATCHDOG_S)


def test_extra_workers_are_refused_by_an_evaluation(watched: TrainingRun) -> None:
    watched.ledger.create_run("e", "evaluate", "sao", {"evaluation": {"alone": True}})
    with pytest.raises(ConfigError, match=r"run e is an evaluation.*rollout\.workers"):
        ExtraWorkers(watched.settings, watched.ledger, "e", 1, lambda line: None)


def test_a_worker_that_only_says_that_it_lives_is_no_progress(watched: TrainingRun) -> None:
    def beat() -> None:
        watched.ledger.heartbeat("run", "w", "running", 0, "host", 1, LEASE_S)

    with pytest.raises(NoProgress):
        check_for(watched, 20 * WATCHDOG_S, beat)


def test_every_recorded_rollout_is_progress(watched: TrainingRun) -> None:
    watched.ledger.issue("run", prompts(8))
    for _ in range(8):
        check_for(watched, WATCHDOG_S / 2)
        make(watched.ledger, "run", 1)
    with pytest.raises(NoProgress):
        check_for(watched, 20 * WATCHDOG_S)


def test_a_stop_request_ends_the_wait_at_once_and_keeps_its_first_reason(watched: TrainingRun) -> None:
    watched.request_stop("Cancelled in the Prefect UI")
    watched.request_stop("Stopped by SystemExit")
    with pytest.raises(StopRequested, match="Cancelled in the Prefect UI"):
        watched.wait(lambda: False, "waiting")


def test_what_a_killed_process_had_leased_is_taken_back_at_once(watched: TrainingRun) -> None:
    """Without waiting for the lease to run out; on another machine only silence tells that it is gone."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    watched.ledger.issue("run", prompts(3))
    here = socket.gethostname()
    for worker, host, pid in (("dead", here, dead.pid), ("alive", here, os.getpid()), ("far", "elsewhere", dead.pid)):
        watched.ledger.heartbeat("run", worker, "running", 0, host, pid, LEASE_S)
        watched.ledger.lease("run", worker, TRAIN, 1, LEASE_S)
    watched.check()
    assert watched.ledger.queue("run") == {"pending": 1, "leased": 2, "ready": 0, "claimed": 0}
    again = watched.ledger.lease("run", "alive", TRAIN, 3, LEASE_S)
    assert [(request.number, request.attempt) for request in again] == [(0, 2)]
