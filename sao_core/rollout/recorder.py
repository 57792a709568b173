"""Builds the stored record of one rollout from what was said, in order: prompt, actions, observations, rewards.

Masks, log-probabilities and versions come from what the engine sampled, never from comparing ids. A reward lands on
the last action token of its turn, so a terminal one lands on the last action token of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.engine import Sampled
from sao_core.rollout.parts import UNFINISHED, RolloutPart, Unfinished
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


_Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""token_ids, action_mask, behavior_logprobs, policy_versions."""


@dataclass
class _Segment:
    pieces: list[_Columns] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    length: int = 0
    last_action: int = -1

    @classmethod
    def of(cls, begun: Trajectory) -> _Segment:
        columns = (begun.token_ids, begun.action_mask, begun.behavior_logprobs, begun.policy_versions)
        rewards = [(int(index), float(begun.rewards[index])) for index in np.flatnonzero(begun.rewards)]
        last = np.flatnonzero(begun.action_mask)[-1:]
        return cls([columns], list(begun.turns), rewards, begun.num_tokens, int(last[0]) if len(last) else -1)

    def append(self, role: Role, token_ids: Sequence[int] | np.ndarray, sampled: Sampled | None = None) -> None:
        count = len(token_ids)
        logprobs = np.zeros(count, np.float32) if sampled is None else sampled.logprobs
        versions = np.full(count, -1, np.int32) if sampled is None else sampled.versions
        mask = np.full(count, sampled is not None)
        self.pieces.append((np.asarray(token_ids, np.int32), mask, logprobs, versions))
        self.turns.append(Turn(role, self.length, self.length + count))
        self.length += count
        if sampled is not None:
            self.last_action = self.length - 1

    def go_on(self, sampled: Sampled) -> None:
        """More of the turn that the policy is at."""
        begun = self.turns.pop()
        self.append(begun.role, sampled.token_ids, sampled)
        self.turns[-1] = Turn(begun.role, begun.start, self.length)

    def turns_within(self, start: int, stop: int) -> tuple[Turn, ...]:
        """Turns of the tokens ``start:stop``, counted from ``start``."""
        return tuple(
            Turn(turn.role, max(turn.start, start) - start, min(turn.stop, stop) - start)
            for turn in self.turns
            if max(turn.start, start) < min(turn.stop, stop) or start < turn.start == turn.stop <= stop
        )


class Recorder:
    """Records one rollout. Call :meth:`start_segment` first, :meth:`rollout` last.

    ``begun`` is what an earlier attempt left: then the record goes on with its last token.
    """

    def __init__(self, request: RolloutRequest, circumstances: Circumstances, begun: Unfinished | None = None) -> None:
        self._request, self._circumstances = request, circumstances
        self._segments: list[_Segment] = []
        self._at = -1
        self.messages: list[Message] = []
        """The conversation so far, for people and for templates that rewrite history."""
        self.reward_parts: dict[str, float] = {}
        """What the score is made of, as far as the environment says so."""
        self.info: dict[str, str | float | bool] = {}
        """What else of the environment's results is stored."""
        self.num_action_tokens = 0
        self.num_turns = 0
        """Turns of the policy that the environment has answered."""
        self.score = 0.0
        self.open_turn: list[int] = []
        """Token ids of the turn that the environment has not answered yet."""
        self._answered_messages = 0
        self._parts = self._put_messages = 0
        self._put_until = (0, 0)
        if begun is not None:
            self._go_on_from(begun)

    @property
    def segment(self) -> int:
        """Index of the segment at hand, those without actions counted."""
        return self._at

    @property
    def context(self) -> list[int]:
        """Token ids of the segment at hand, the open turn included."""
        ids: list[int] = np.concatenate([piece[0] for piece in self._segments[self._at].pieces]).tolist()
        return ids

    def start_segment(self, role: Role, token_ids: Sequence[int]) -> None:
        """A new token sequence begins with these context tokens, after which the policy speaks."""
        self._segments.append(_Segment())
        self._at = len(self._segments) - 1
        self.observe(role, token_ids)

    def return_to(self, segment: int) -> None:
        """Go on with the tokens of an earlier segment, as several conversations of one rollout do; not with parts."""
        self._at = segment

    def observe(self, role: Role, token_ids: Sequence[int]) -> None:
        """The environment said this, after which the policy speaks."""
        self._segments[self._at].append(role, token_ids)
        self.open_turn = []
        self._answered_messages = len(self.messages)

    def act(self, sampled: Sampled) -> None:
        """The policy said this, or more of the same turn; a turn without any token leaves no trace."""
        if len(sampled.token_ids):
            segment = self._segments[self._at]
            if self.open_turn:
                segment.go_on(sampled)
            else:
                segment.append(Role.ASSISTANT, sampled.token_ids, sampled)
            self.open_turn += sampled.token_ids.tolist()
            self.num_action_tokens += len(sampled.token_ids)

    def reward(self, value: float) -> None:
        """The turn that the policy just spoke earned this; raises ValueError before the first action.

        The learner reads segments side by side, so the last one in which the policy spoke takes it.
        """
        segment = next((segment for segment in reversed(self._segments) if segment.last_action >= 0), None)
        if segment is None:
            raise ValueError("a reward needs an action that earned it")
        segment.rewards.append((segment.last_action, value))
        self.score += value
        self.num_turns += 1

    def part(self, timings: Mapping[str, float]) -> RolloutPart | None:
        """What no part has yet, without the environment's state; None if the policy has said nothing new.

        The last token of an unanswered turn is left for the next part, since a reward may still land on it. Until
        :meth:`put` is called, the next call gives the same and what came since.
        """
        first, start = self._put_until
        held_back = bool(self.open_turn)
        pieces: list[Trajectory] = []
        for number in range(first, len(self._segments)):
            last = number == len(self._segments) - 1
            begin = start if number == first else 0
            stop = self._segments[number].length - (held_back and last)
            if stop > begin:
                messages = self.messages[self._put_messages : self._answered_messages] if last else ()
                pieces.append(self._piece(number, slice(begin, stop), messages, timings))
        if not any(piece.action_mask.any() for piece in pieces):
            return None
        return RolloutPart(self._parts, tuple(pieces), self.num_turns, max(len(self.open_turn) - 1, 0))

    def put(self) -> None:
        """The part that :meth:`part` just made is taken: the next one begins where it ends."""
        self._put_until = (len(self._segments) - 1, self._segments[-1].length - bool(self.open_turn))
        self._put_messages = self._answered_messages
        self._parts += 1

    def rollout(self, outcome: Outcome, stop_reason: str, timings: Mapping[str, float]) -> Rollout:
        """The finished record, checked; segments in which the policy said nothing are left out.

        Raises :class:`sao_core.trajectory.InvalidTrajectory` if a rule is broken, ValueError without any action.
        """
        spoken = [number for number, segment in enumerate(self._segments) if segment.last_action >= 0]
        if not spoken:
            raise ValueError("a rollout without any action cannot be recorded; fail the attempt instead")
        rollout = tuple(
            self._trajectory(
                number,
                self._segments[index],
                slice(0, self._segments[index].length),
                num_segments=len(spoken),
                outcome=outcome,
                stop_reason=stop_reason,
                messages=tuple(self.messages),
                timings=dict(timings),
            )
            for number, index in enumerate(spoken)
        )
        validate_rollout(rollout)
        return rollout

    def _piece(
        self, number: int, tokens: slice, messages: Sequence[Message], timings: Mapping[str, float]
    ) -> Trajectory:
        return self._trajectory(
            number,
            self._segments[number],
            tokens,
            num_segments=len(self._segments),
            outcome=Outcome.FAILED,
            stop_reason=UNFINISHED,
            messages=tuple(messages),
            timings=dict(timings),
        )

    def _trajectory(self, number: int, segment: _Segment, tokens: slice, **more: Any) -> Trajectory:
        """A record of ``tokens`` of a segment."""
        request, circumstances = self._request, self._circumstances
        token_ids, mask, logprobs, versions = (np.concatenate(column) for column in zip(*segment.pieces, strict=True))
        rewards = np.zeros(segment.length, np.float32)
        for index, value in segment.rewards:
            rewards[index] += value
        return Trajectory(
            trajectory_id=f"{request.run_id}-{request.number}-{request.attempt}-{number}",
            run_id=request.run_id,
            request_number=request.number,
            attempt=request.attempt,
            purpose=request.purpose,
            prompt_key=request.prompt_key,
            token_ids=token_ids[tokens],
            action_mask=mask[tokens],
            behavior_logprobs=logprobs[tokens],
            policy_versions=versions[tokens],
            rewards=rewards[tokens],
            score=self.score,
            segment=number,
            group=request.group,
            turns=segment.turns_within(tokens.start, tokens.stop),
            sampling=request.sampling,
            on_swap=circumstances.on_swap,
            renderer_hash=circumstances.renderer_hash,
            environment=circumstances.environment,
            environment_version=circumstances.environment_version,
            environment_seed=circumstances.environment_seed,
            difficulty=circumstances.difficulty,
            reward_parts=dict(self.reward_parts),
            info=dict(self.info),
            **more,
        )

    def _go_on_from(self, begun: Unfinished) -> None:
        latest = begun.segments[-1]
        self._segments = [_Segment.of(segment) for segment in begun.segments]
        self._at = len(self._segments) - 1
        self.messages = list(begun.messages)
        self.reward_parts, self.info = dict(latest.reward_parts), dict(latest.info)
        self.num_action_tokens = sum(segment.num_action_tokens for segment in begun.segments)
        self.num_turns, self.score = begun.turns, latest.score
        self.open_turn = latest.token_ids[latest.num_tokens - begun.open_tokens :].tolist()
        self._answered_messages = self._put_messages = len(self.messages)
        self._parts, self._put_until = begun.parts, (len(self._segments) - 1, latest.num_tokens)
