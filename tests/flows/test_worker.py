"""A worker that is told to leave asks its flow runs first, and waits for them; whatever Prefect's worker would do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows import worker
from infra.settings import Settings
from sao_core.config import ConfigError

FLOW_RUN = """
import pathlib, signal, sys, time
kept = pathlib.Path(sys.argv[1])
def stop(*_):
    time.sleep(0.5)
    kept.write_text("checkpoint")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
kept.with_suffix(".up").touch()
time.sleep(60)
"""

PREFECT_WORKER = """
import signal, subprocess, sys, time
run = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
def stop(*_):
    run.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
run.wait()
time.sleep(60)
"""

WORK = """
import sys
from pathlib import Path
from flows import worker
from infra.settings import Settings
worker._command = lambda *_: [sys.executable, "-c", *sys.argv[2:]]
settings = Settings.from_environment({"PREFECT_API_URL": "http://127.0.0.1:1/api"}, Path(sys.argv[1]))
sys.exit(worker.work(settings, None, None, None))
"""


def eventually(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_flow_runs_keep_their_checkpoint_before_the_worker_leaves(tmp_path: Path, number: signal.Signals) -> None:
    kept = tmp_path / "kept"
    arguments = [str(tmp_path), PREFECT_WORKER, FLOW_RUN, str(kept)]
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, *arguments], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    eventually(kept.with_suffix(".up").exists)
    process.send_signal(number)
    assert process.wait(20) == 0
    assert kept.read_text() == "checkpoint"


def test_a_worker_that_ends_by_itself_is_a_failure(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "import sys; sys.exit(0)"]
    done = subprocess.run(
        [sys.executable, "-c", WORK, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=20,
        check=False,
    )
    assert done.returncode == 1


def test_a_worker_needs_a_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PREFECT_API_URL"):
        worker.work(Settings.from_environment({}, tmp_path), (), None, None)


@pytest.mark.parametrize(
    ("queues", "expected"),
    [([], []), (["rollout"], ["--work-queue", "rollout"]), (["a", "b"], ["--work-queue", "a", "--work-queue", "b"])],
)
def test_a_worker_takes_all_queues_or_those_that_it_is_for(queues: list[str], expected: list[str]) -> None:
    command = worker._command(queues, 2, None)
    assert command[command.index("--pool") + 1] == "sao"
    assert command[-len(expected) - 2 :] == [*expected, "--limit", "2"]
    assert ("--work-queue" in command) == bool(queues)
