"""A training run that is as short as can be and still does everything, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import mlflow
import psutil

from infra.ledger import Ledger
from infra.settings import Settings

UPDATES = 6
BATCH = 16
SHORT = (
    f"learner.updates={UPDATES}",
    f"learner.batch_size={BATCH}",
    "learner.checkpoint_every=3",
    "learner.record_tokens=all",
    "rollout.slots=16",
    "policy.first_update_step=2",
    "critic.pretrain.rollouts=48",
    "critic.pretrain.max_epochs=2",
    "warm_start.demonstrations=2000",
    "environment.options.tool_latency_mean_s=0.2",
    "evaluation.every=3",
    "evaluation.prompts=16",
    "asynchrony.keep_policies=null",
)

FASTEST_BATCH = 8
FASTEST = (
    f"learner.batch_size={FASTEST_BATCH}",
    "learner.checkpoint_every=2",
    "learner.record_tokens=none",
    "rollout.slots=8",
    "rollout.lease_s=5",
    "rollout.max_turns=2",
    "rollout.max_action_tokens=12",
    "rollout.max_context_tokens=96",
    "policy.first_update_step=1",
    "critic.pretrain.rollouts=16",
    "critic.pretrain.max_epochs=1",
    "warm_start.enabled=false",
    "environment.options.tool_latency_mean_s=0.05",
    "evaluation.every=4",
    "evaluation.prompts=4",
)
"""As little work as a run can have that uses every part; what it learns does not matter."""


@dataclass(frozen=True)
class Home:
    """A folder in which `sao` is run, and the variables that a user there has set."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return Settings.from_environment(self.variables, directory=self.folder)

    def sao(self, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
        """Run `sao` here as a user would, in an environment without anybody's settings."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def start(self, *arguments: str, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start `sao` here."""
        return self._start("-m", "flows.cli", *arguments, stdout=stdout)

    def python(self, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
        """Run a script here, in the same environment."""
        process = self._start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def _start(self, *arguments: str, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SAO_", "PREFECT_", "MLFLOW_", "AWS_"))}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**environment, "COLUMNS": "200", **self.variables},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )

    def train(self, *settings: str) -> subprocess.Popen[str]:
        """Start to train the tiny recipe with some settings."""
        return self.start("train", "tiny", *(part for setting in settings for part in ("--set", setting)))

    def ledger(self) -> Ledger:
        """The ledger of this installation."""
        return Ledger(self.settings.database_url)

    def wait_for_step(self, process: subprocess.Popen[str], step: int, timeout_s: float = 200) -> str:
        """Wait until the run that a process began, or goes on with, has made a step; returns the run's id."""
        ledger, deadline = self.ledger(), time.monotonic() + timeout_s
        since = psutil.Process(process.pid).create_time()
        while True:
            for run in ledger.runs(1):
                last = ledger.last_update(run.run_id)
                if last is not None and last.step >= step and last.committed_at >= since:
                    return run.run_id
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"not at step {step} after {timeout_s:g} s"
            time.sleep(0.1)

    def json(self, *arguments: str) -> Any:
        done = self.sao(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _hear_interrupts() -> None:
    """A job in the background of a shell ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def points_per_step(tracking_uri: str, mlflow_run_id: str | None) -> dict[int, int]:
    """Step → points of a metric that every update logs."""
    assert mlflow_run_id is not None
    history = mlflow.MlflowClient(tracking_uri).get_metric_history(mlflow_run_id, "reward/mean")
    return dict(Counter(point.step for point in history))


def once_each(updates: int) -> dict[int, int]:
    """What :func:`points_per_step` finds after a run of so many updates."""
    return dict.fromkeys(range(1, updates + 1), 1)
