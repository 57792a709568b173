"""What may change when a run is resumed, and what would make it another run.

A run that goes on with another algorithm, model or task is no continuation: its steps could not be compared with each
other. Pace, limits and learning rates may follow what one has seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sao_core.config import ConfigError, TrainConfig

CHANGEABLE = frozenset(
    {
        "policy.lr",
        "critic.lr",
        "learner.updates",
        "learner.checkpoint_every",
        "learner.keep_checkpoints",
        "learner.micro_batch_tokens",
        "learner.record_tokens",
        "learner.threads",
        "learner.device",
        "rollout.workers",
        "rollout.slots",
        "rollout.threads",
        "rollout.device",
        "rollout.restarts",
        "rollout.max_attempts",
        "rollout.lease_s",
        "rollout.step_timeout_s",
        "rollout.rollout_timeout_s",
        "rollout.flush_interval_s",
        "rollout.partial_after_s",
        "asynchrony.keep_policies",
        "asynchrony.watchdog_s",
        "evaluation.every",
        "tracking.enabled",
        "tracking.study",
        "tracking.traces",
    }
)
"""Settings that a resume may change."""


@dataclass(frozen=True)
class Change:
    """A setting that a resume changes."""

    setting: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.setting}: {_shown(self.old)} → {_shown(self.new)}"


def changes(old: TrainConfig, new: TrainConfig) -> list[Change]:
    """What ``new`` changes in a run that began with ``old``, by name of the setting.

    Raises:
        ConfigError: something that must stay would change; the message names every such setting with both values.
    """
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    differing = [
        Change(setting, before.get(setting), after.get(setting))
        for setting in sorted(before.keys() | after.keys())
        if before.get(setting) != after.get(setting)
    ]
    refused = [str(change) for change in differing if change.setting not in CHANGEABLE]
    if refused:
        raise ConfigError(
            f"a resumed run keeps its {', '.join(refused)}; start a new run for that "
            "(model.path may be an exported checkpoint)"
        )
    return differing


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _shown(value: Any) -> str:
    return "empty" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
