"""The record that everything passes along: one token sequence, what was sampled and what came of it.

A rollout is one trajectory, or several *segments* of it where a chat template rewrote history.
Nothing here decodes or re-encodes tokens, and nothing changes a record once it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

LOGPROB_TOLERANCE = 1e-6
SCORE_TOLERANCE = 1e-5


class Outcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """The environment ended it."""
    TRUNCATED = "truncated"
    """A limit of tokens, turns or time ended it."""
    FAILED = "failed"
    """Infrastructure broke (crash, sandbox lost, engine error): never trained on, always counted."""
    BLOCKED = "blocked"
    """A safety rule withheld it."""


class Purpose(StrEnum):
    """What a rollout was asked for."""

    TRAIN = "train"
    VALUE_PRETRAIN = "value_pretrain"
    EVALUATE = "evaluate"
    FEEDBACK = "feedback"


class Role(StrEnum):
    """Who speaks in a turn."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class InvalidTrajectory(ValueError):
    """A record that breaks a rule; the message names the first one broken."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation, for people and for chat templates."""

    role: Role
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else chat templates read of a message, as OpenAI names it: ``tool_calls``, ``tool_call_id``, ``name``; in a
    demonstration's first message also ``tools``, those that its prompt shows. JSON values, since it is stored."""

    def as_dict(self) -> dict[str, Any]:
        """The mapping that chat templates expect."""
        return {"role": str(self.role), "content": self.content, **self.extra}


@dataclass(frozen=True)
class Turn:
    """A span of tokens ``start:stop``; ``role`` is ASSISTANT where the policy sampled them."""

    role: Role
    start: int
    stop: int


@dataclass(frozen=True)
class Sampling:
    """How tokens were drawn. Training draws from the policy itself: top-p 1, top-k off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False


@dataclass(frozen=True)
class Trajectory:
    """One stored token sequence of length T.

    Arrays (all of shape (T,)): ``token_ids`` int32, ``action_mask`` bool (True where the policy
    sampled the token), ``behavior_logprobs`` float32 (log-probability under the policy that
    sampled it, recorded at that moment; 0 off the mask), ``policy_versions`` int32 (−1 off the
    mask), ``rewards`` float32 (placed on action tokens; their sum over all segments is ``score``).
    """

    trajectory_id: str
    run_id: str
    request_number: int
    attempt: int
    purpose: Purpose
    prompt_key: str
    token_ids: npt.NDArray[np.int32]
    action_mask: npt.NDArray[np.bool_]
    behavior_logprobs: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32]
    score: float
    outcome: Outcome
    stop_reason: str
    segment: int = 0
    num_segments: int = 1
    group: int | None = None
    turns: tuple[Turn, ...] = ()
    messages: tuple[Message, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    on_swap: str = "recompute"
    renderer_hash: str = ""
    environment: str = ""
    environment_version: str = ""
    environment_seed: int = 0
    difficulty: str = ""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, str | float | bool] = field(default_factory=dict)
    """What the environment left beside rewards, e.g. the final ``patch`` of a repair."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.action_mask.sum())

    @property
    def num_turns(self) -> int:
        """Number of turns that the policy spoke."""
        return sum(turn.role is Role.ASSISTANT for turn in self.turns)

    @property
    def version_min(self) -> int:
        """Oldest policy version that sampled a token."""
        return int(self.policy_versions[self.action_mask].min())

    @property
    def version_max(self) -> int:
        """Newest policy version that sampled a token."""
        return int(self.policy_versions[self.action_mask].max())

    def validate(self) -> None:
        """Raise :class:`InvalidTrajectory` naming the first broken rule."""
        name = f"trajectory {self.trajectory_id}"
        arrays: dict[str, tuple[npt.NDArray[Any], type]] = {
            "token_ids": (self.token_ids, np.int32),
            "action_mask": (self.action_mask, np.bool_),
            "behavior_logprobs": (self.behavior_logprobs, np.float32),
            "policy_versions": (self.policy_versions, np.int32),
            "rewards": (self.rewards, np.float32),
        }
        for key, (array, dtype) in arrays.items():
            if array.dtype != dtype:
                raise InvalidTrajectory(f"{name}: {key} must be {dtype.__name__}: got {array.dtype}")
            if array.shape != (self.num_tokens,):
                raise InvalidTrajectory(
                    f"{name}: {key} must have length {self.num_tokens} like token_ids: got {array.shape}"
                )
        mask = self.action_mask
        if not mask.any():
            raise InvalidTrajectory(f"{name}: at least one action token is needed: got none of {self.num_tokens}")
        logprobs = self.behavior_logprobs[mask]
        if not np.isfinite(logprobs).all():
            raise InvalidTrajectory(f"{name}: behavior_logprobs must be finite on action tokens")
        if logprobs.max() > LOGPROB_TOLERANCE:
            raise InvalidTrajectory(f"{name}: behavior_logprobs must be ≤ 0: got {logprobs.max():.6g}")
        versions = self.policy_versions[mask]
        if versions.min() < 0:
            raise InvalidTrajectory(f"{name}: every action token needs a policy version: got {versions.min()}")
        if (np.diff(versions) < 0).any():
            raise InvalidTrajectory(f"{name}: policy_versions must not decrease along the tokens")
        if self.rewards[~mask].any():
            raise InvalidTrajectory(f"{name}: rewards belong on action tokens only")
        if not np.isfinite(self.rewards).all():
            raise InvalidTrajectory(f"{name}: rewards must be finite")
        if self.num_segments == 1:
            _check_score(name, [self], self.score)


def validate_rollout(segments: Sequence[Trajectory]) -> None:
    """Check each segment and that the rewards of all of them sum to the score."""
    for segment in segments:
        segment.validate()
    first = segments[0]
    name = f"rollout of request {first.request_number}"
    if [s.segment for s in segments] != list(range(first.num_segments)):
        raise InvalidTrajectory(
            f"{name}: segments 0…{first.num_segments - 1} are needed in order: got {[s.segment for s in segments]}"
        )
    _check_score(name, segments, first.score)


def _check_score(name: str, segments: Sequence[Trajectory], score: float) -> None:
    placed = float(sum(np.sum(s.rewards, dtype=np.float64) for s in segments))
    if not abs(placed - score) <= SCORE_TOLERANCE * max(1.0, abs(score)):
        raise InvalidTrajectory(f"{name}: placed rewards must sum to the score {score:.6g}: got {placed:.6g}")


ARRAY_FIELDS = ("token_ids", "action_mask", "behavior_logprobs", "policy_versions", "rewards")
"""The per-token columns, in the order in which hashes read them."""

SCALAR_FIELDS = tuple(f.name for f in fields(Trajectory) if f.name not in ARRAY_FIELDS)
"""Everything else a trajectory carries."""
