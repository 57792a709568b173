"""The runs of this folder's tests: what is typed into the form, and what is known of a run that it started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from installation import Installation
from short_run import FASTEST

from infra.services import MLFLOW, running

UPDATES = 4

_FASTEST = dict(setting.split("=", 1) for setting in FASTEST if not setting.startswith("environment.options."))

QUICK = {
    **_FASTEST,
    "learner.updates": str(UPDATES),
    "learner.record_tokens": "all",
    "environment.options": json.dumps({"tool_latency_mean_s": 0.05}),
    "tracking.traces": "1",
}
"""Setting → what to type into its field: numbers, choices, a switch and JSON."""

LEARNS = {
    "learner.updates": "20",
    "learner.record_tokens": "all",
    "critic.pretrain.rollouts": "128",
    "warm_start.demonstrations": "6000",
    "evaluation.every": "10",
    "evaluation.prompts": "64",
    "tracking.traces": "2",
}
"""A run that is worth a picture, in about a minute."""

HOSTILE = (
    *(setting for setting in FASTEST if not setting.startswith("environment.options.")),
    "learner.updates=2",
    "learner.record_tokens=all",
    "environment.name=hostile_environment:SPEC",
    "rollout.max_context_tokens=512",
    "algorithm.name=grpo",
    "evaluation.every=0",
    "evaluation.prompts=7",
    "tracking.traces=3",
)
"""Another algorithm too, so that a comparison shows a difference."""


@dataclass(frozen=True)
class Started:
    """A flow run that holds a training run."""

    up: Installation
    flow_run: str

    @cached_property
    def run_id(self) -> str:
        return self.up.run_of(self.flow_run)

    @property
    def page(self) -> str:
        """Its page in Prefect."""
        return f"{self.up.prefect}/v2/runs/flow-run/{self.flow_run}"

    @property
    def mlflow(self) -> str:
        return running(self.up.home.settings, MLFLOW) or ""

    @cached_property
    def artifacts(self) -> dict[str, dict[str, Any]]:
        """Key → the newest artifact of that key, once the run is over."""
        found = sorted(self.up.artifacts(self.flow_run), key=lambda artifact: artifact["created"])
        return {artifact["key"]: artifact for artifact in found}

    def artifact_page(self, key: str) -> str:
        return f"{self.up.prefect}/v2/artifacts/artifact/{self.artifacts[key]['id']}"
