"""Builds the stored record of one rollout from what was said, in order: prompt, actions, observations, rewards.

Masks, log-probabilities and versions come from what the engine sampled, never from comparing ids. A reward lands on
the last action token of its turn, so a terminal one lands on the last action token of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.engine import Sampled
from sao_core.trajectory import Message, Outcome, Role, Trajectory, Turn, validate_rollout


@dataclass(frozen=True)
class Circumstances:
    """What holds for a whole rollout: how it was made, not what happened in it."""

    on_swap: str
    renderer_hash: str
    environment: str
    environment_version: str
    environment_seed: int
    difficulty: str


@dataclass
class _Segment:
    pieces: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    actions: list[tuple[int, Sampled]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    length: int = 0

    def append(self, role: Role, token_ids: Sequence[int] | np.ndarray) -> int:
        piece = np.asarray(token_ids, np.int32)
        start, self.length = self.length, self.length + len(piece)
        self.pieces.append(piece)
        self.turns.append(Turn(role, start, self.length))
        return start


class Recorder:
    """Records one rollout. Call :meth:`start_segment` first, :meth:`rollout` last."""

    def __init__(self, request: RolloutRequest, circumstances: Circumstances) -> None:
        self._request, self._circumstances = request, circumstances
        self._segments: list[_Segment] = []
        self.messages: list[Message] = []
        """The conversation so far, for people and for templates that rewrite history."""
        self.num_action_tokens = 0
        self.score = 0.0

    def start_segment(self, role: Role, token_ids: Sequence[int]) -> None:
        """A new token sequence begins with these context tokens."""
        self._segments.append(_Segment())
        self._segments[-1].append(role, token_ids)

    def observe(self, role: Role, token_ids: Sequence[int]) -> None:
        """The environment said this."""
        self._segments[-1].append(role, token_ids)

    def act(self, sampled: Sampled) -> None:
        """The policy said this; a turn without any token leaves no trace."""
        if len(sampled.token_ids):
            segment = self._segments[-1]
            start = segment.append(Role.ASSISTANT, sampled.token_ids)
            segment.actions.append((start, sampled))
            self.num_action_tokens += len(sampled.token_ids)

    def reward(self, value: float) -> None:
        """The turn that the policy just spoke earned this; raises ValueError before the first action."""
        segment = self._segments[-1]
        if not segment.actions:
            raise ValueError("a reward needs an action that earned it")
        start, sampled = segment.actions[-1]
        segment.rewards.append((start + len(sampled.token_ids) - 1, value))
        self.score += value

    def rollout(
        self,
        outcome: Outcome,
        stop_reason: str,
        reward_parts: Mapping[str, float],
        timings: Mapping[str, float],
    ) -> Rollout:
        """The finished record, checked; segments in which the policy said nothing are left out.

        Raises :class:`sao_core.trajectory.InvalidTrajectory` if a rule is broken, ValueError without any action.
        """
        segments = [segment for segment in self._segments if segment.actions]
        if not segments:
            raise ValueError("a rollout without any action cannot be recorded; fail the attempt instead")
        rollout = tuple(
            self._trajectory(number, len(segments), segment, outcome, stop_reason, reward_parts, timings)
            for number, segment in enumerate(segments)
        )
        validate_rollout(rollout)
        return rollout

    def _trajectory(
        self,
        number: int,
        count: int,
        segment: _Segment,
        outcome: Outcome,
        stop_reason: str,
        reward_parts: Mapping[str, float],
        timings: Mapping[str, float],
    ) -> Trajectory:
        request, circumstances = self._request, self._circumstances
        mask = np.zeros(segment.length, np.bool_)
        logprobs = np.zeros(segment.length, np.float32)
        versions = np.full(segment.length, -1, np.int32)
        rewards = np.zeros(segment.length, np.float32)
        for start, sampled in segment.actions:
            span = slice(start, start + len(sampled.token_ids))
            mask[span] = True
            logprobs[span] = sampled.logprobs
            versions[span] = sampled.versions
        for index, value in segment.rewards:
            rewards[index] += value
        return Trajectory(
            trajectory_id=f"{request.run_id}-{request.number}-{request.attempt}-{number}",
            run_id=request.run_id,
            request_number=request.number,
            attempt=request.attempt,
            purpose=request.purpose,
            prompt_key=request.prompt_key,
            token_ids=np.concatenate(segment.pieces),
            action_mask=mask,
            behavior_logprobs=logprobs,
            policy_versions=versions,
            rewards=rewards,
            score=self.score,
            outcome=outcome,
            stop_reason=stop_reason,
            segment=number,
            num_segments=count,
            group=request.group,
            turns=tuple(segment.turns),
            messages=tuple(self.messages),
            sampling=request.sampling,
            on_swap=circumstances.on_swap,
            renderer_hash=circumstances.renderer_hash,
            environment=circumstances.environment,
            environment_version=circumstances.environment_version,
            environment_seed=circumstances.environment_seed,
            difficulty=circumstances.difficulty,
            reward_parts=dict(reward_parts),
            timings=dict(timings),
        )
