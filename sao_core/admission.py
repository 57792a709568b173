"""Which rollouts and which tokens of a batch may be trained on, and how old they are.

Nothing is dropped for age unless a setting says so. What is left out is named with its reason, never forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sao_core.config import TrainConfig
from sao_core.protocols import Rollout
from sao_core.trajectory import Outcome

UNTRAINABLE = (Outcome.FAILED, Outcome.BLOCKED)
"""Outcomes that say nothing about the policy."""


def refusal(rollout: Rollout, config: TrainConfig, policy_steps: Mapping[int, int] | None, step: int) -> str | None:
    """Why a rollout is not trained on in ``step``, or None if it is.

    ``failed`` and ``blocked`` by outcome, ``truncated`` under `algorithm.truncation=exclude`, ``sampling`` if it was
    not drawn from the policy itself at the run's temperature, ``stale`` under `asynchrony.stale=reject`. Without
    ``policy_steps`` age is not asked for.
    """
    first = rollout[0]
    if first.outcome in UNTRAINABLE:
        return str(first.outcome)
    if first.outcome is Outcome.TRUNCATED and config.algorithm.truncation == "exclude":
        return "truncated"
    s = first.sampling
    same_temperature = math.isclose(s.temperature, config.rollout.temperature, rel_tol=1e-6)
    if s.greedy or s.top_p != 1.0 or s.top_k != 0 or not same_temperature:
        return "sampling"
    limit = config.asynchrony.max_token_age
    if policy_steps is not None and limit is not None and config.asynchrony.stale == "reject":
        oldest = min(segment.version_min for segment in rollout)
        if step - 1 - _step_of(oldest, policy_steps) > limit:
            return "stale"
    return None


def token_ages(policy_versions: Tensor, policy_steps: Mapping[int, int], step: int) -> Tensor:
    """Updates between the policy that sampled a token and the policy that ``step`` trains (that of step − 1).

    ``policy_versions`` (B, T), −1 off the mask → ages (B, T), 0 off the mask. Raises ValueError for a version without
    a step.
    """
    versions, where = torch.unique(policy_versions, return_inverse=True)
    steps = [step - 1 if version < 0 else _step_of(version, policy_steps) for version in versions.tolist()]
    return step - 1 - torch.tensor(steps, device=policy_versions.device)[where]


def _step_of(version: int, policy_steps: Mapping[int, int]) -> int:
    if version not in policy_steps:
        raise ValueError(f"policy version {version} has no step: known are {sorted(policy_steps)}")
    return policy_steps[version]


def group_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """The group of each rollout; one without a group is a group of its own."""
    return [r[0].group if r[0].group is not None else -1 - number for number, r in enumerate(rollouts)]
