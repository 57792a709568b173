"""A training run that is as short as can be and still does everything, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Home:
    """A folder in which `sao` was run."""

    folder: Path

    @property
    def settings(self) -> Settings:
        return Settings.from_environment({}, directory=self.folder)

    def sao(self, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
        """Run `sao` here as a user would, in an environment without anybody's settings."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `sao` here."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SAO_", "PREFECT_", "MLFLOW_", "AWS_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=self.folder,
            env=environment | {"COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def json(self, *arguments: str) -> Any:
        done = self.sao(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
