"""A resume takes a run up only once its last learner is gone, and writes down what it changes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from infra import attempts
from infra.attempts import RunAlive, begin, wait_for_learner
from infra.ledger import Ledger
from infra.requests import new_worker_id
from sao_core.config import ConfigError, TrainConfig, parse_config


def beat(
    ledger: Ledger, run_id: str, pid: int, state: str = "update 3", host: str | None = None, role: str = "learner"
) -> None:
    name = new_worker_id(role)
    ledger.heartbeat(run_id, name, state, None, host or socket.gethostname(), pid, 30.0)


@pytest.fixture
def run_id(ledger: Ledger) -> str:
    name = new_worker_id("run")
    assert begin(ledger, name, TrainConfig(), lambda line: None) == 1
    return name


def test_a_run_that_another_process_trains_is_not_taken_over(ledger, run_id, monkeypatch):
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.3)
    beat(ledger, run_id, os.getpid())
    with pytest.raises(RunAlive, match=rf"{run_id} is being trained by process {os.getpid()} on .*stop it"):
        begin(ledger, run_id, TrainConfig(), lambda line: None)
    assert ledger.run(run_id).attempt == 1


def test_an_evaluation_that_another_process_makes_is_not_taken_over(ledger, monkeypatch):
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.3)
    config, run_id = parse_config({"evaluation": {"alone": True}}), new_worker_id("run")
    begin(ledger, run_id, config, lambda line: None)
    beat(ledger, run_id, os.getpid(), role="evaluator-1")
    with pytest.raises(RunAlive, match=rf"{run_id} is being evaluated by process {os.getpid()} on .*stop it"):
        begin(ledger, run_id, config, lambda line: None)
    assert ledger.run(run_id).attempt == 1


def test_the_evaluator_of_a_training_run_keeps_nobody_waiting(ledger, run_id):
    beat(ledger, run_id, os.getpid(), role="evaluator")
    assert begin(ledger, run_id, TrainConfig(), lambda line: None) == 2


def test_a_learner_that_was_killed_on_this_machine_is_not_waited_for(ledger, run_id):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    beat(ledger, run_id, process.pid)
    assert begin(ledger, run_id, TrainConfig(), lambda line: None) == 2


def test_a_learner_elsewhere_is_gone_once_it_is_silent(ledger, run_id, monkeypatch):
    beat(ledger, run_id, os.getpid(), host="another-machine")
    monkeypatch.setattr(attempts, "SILENT_S", 0.3)
    wait_for_learner(ledger, run_id, lambda line: None)


def test_a_learner_that_keeps_its_checkpoint_is_waited_for(ledger, run_id, monkeypatch):
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.0)
    beat(ledger, run_id, os.getpid(), state=attempts.STOPPING, host="another-machine")
    monkeypatch.setattr(attempts, "SILENT_S", 0.5)
    said: list[str] = []
    wait_for_learner(ledger, run_id, said.append)
    assert len(said) == 1
    assert "waiting for the learner" in said[0]


def test_what_a_resume_changes_is_said_and_written_down(ledger, run_id):
    new = parse_config({"policy": {"lr": 2e-6}, "rollout": {"max_attempts": 5}})
    said: list[str] = []
    assert begin(ledger, run_id, new, said.append) == 2
    assert said == ["changed: policy.lr: 1e-06 → 2e-06", "changed: rollout.max_attempts: 3 → 5"]
    assert ledger.run(run_id).config["policy"]["lr"] == 2e-6
    changed = ledger.config_changes(run_id)
    assert [(c.attempt, c.step, c.setting, c.old, c.new) for c in changed] == [
        (2, 0, "policy.lr", 1e-6, 2e-6),
        (2, 0, "rollout.max_attempts", 3, 5),
    ]


def test_a_resume_with_another_algorithm_is_refused_and_changes_nothing(ledger, run_id):
    new = parse_config({"algorithm": {"name": "grpo"}, "policy": {"lr": 2e-6}, "learner": {"batch_size": 128}})
    with pytest.raises(ConfigError, match=r"algorithm.name: sao → grpo"):
        begin(ledger, run_id, new, lambda line: None)
    assert ledger.run(run_id).attempt == 1
    assert ledger.run(run_id).config["policy"]["lr"] == 1e-6
    assert ledger.config_changes(run_id) == []


def test_a_killed_learner_that_nobody_has_reaped_is_not_waited_for(ledger, run_id):
    """As where the first process of a container does not reap."""
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        beat(ledger, run_id, process.pid)
        assert begin(ledger, run_id, TrainConfig(), lambda line: None) == 2
