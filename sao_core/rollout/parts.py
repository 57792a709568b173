"""Parts of a rollout that is not finished: what its worker cannot take with it when it dies.

A part has what no earlier one has and is never changed or repeated, so that what is written grows with the rollout and
not with its square. :func:`join` puts parts together again; a recorder can go on from there, in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sao_core.trajectory import ARRAY_FIELDS, Message, Role, Trajectory, Turn

UNFINISHED = "unfinished"
"""Stop reason of what a part holds; its outcome is FAILED, which is what it is if nothing follows."""


@dataclass(frozen=True)
class RolloutPart:
    """The tokens, rewards and messages of one rollout that came since the part before."""

    number: int
    """0, 1, … within the rollout."""
    pieces: tuple[Trajectory, ...]
    """The new tokens of each segment that has some, turns counted from the first of them; the last piece carries the
    new messages, all of them the score, ``reward_parts`` and timings of the rollout so far."""
    turns: int
    """Turns of the policy that the environment has answered."""
    open_tokens: int
    """Last action tokens, of this part and earlier ones, that belong to a turn which it has not answered."""
    state: str | None = None
    """The environment as that turn found it, in JSON; None if it cannot be restored."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all pieces."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(piece.num_action_tokens for piece in self.pieces)


@dataclass(frozen=True)
class Unfinished:
    """What the parts of a rollout add up to."""

    segments: tuple[Trajectory, ...]
    """All that is known of each segment. The last one may still lack actions, so not all rules hold."""
    parts: int
    turns: int
    open_tokens: int
    state: str | None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to the open turn."""
        return self.segments[-1].messages

    @property
    def version_max(self) -> int:
        """Newest policy version that sampled a token."""
        return max(int(segment.policy_versions.max()) for segment in self.segments)


def join(parts: Sequence[RolloutPart]) -> Unfinished:
    """Put all parts of a rollout together, in order.

    Raises ValueError if there is none, or one is missing.
    """
    numbers = [part.number for part in parts]
    if not parts or numbers != list(range(len(parts))):
        raise ValueError(f"parts 0, 1, … of a rollout are needed in order: got {numbers}")
    pieces: dict[int, list[Trajectory]] = {}
    messages: tuple[Message, ...] = ()
    for part in parts:
        for piece in part.pieces:
            pieces.setdefault(piece.segment, []).append(piece)
            messages += piece.messages
    latest = parts[-1].pieces[-1]
    segments = tuple(
        replace(
            latest,
            trajectory_id=f"{latest.run_id}-{latest.request_number}-{latest.attempt}-{number}",
            segment=number,
            num_segments=len(pieces),
            turns=_joined_turns(mine),
            messages=messages,
            **_joined_arrays(mine),
        )
        for number, mine in sorted(pieces.items())
    )
    last = parts[-1]
    return Unfinished(segments, len(parts), last.turns, last.open_tokens, last.state)


def _joined_arrays(pieces: Sequence[Trajectory]) -> dict[str, Any]:
    return {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in ARRAY_FIELDS}


def _joined_turns(pieces: Sequence[Trajectory]) -> tuple[Turn, ...]:
    """Turns of consecutive pieces; one of the policy that was cut in two is one again."""
    turns: list[Turn] = []
    offset = 0
    for piece in pieces:
        for turn in piece.turns:
            start, stop = turn.start + offset, turn.stop + offset
            if turns and turn.role is turns[-1].role is Role.ASSISTANT:
                start = turns.pop().start
            turns.append(Turn(turn.role, start, stop))
        offset += piece.num_tokens
    return tuple(turns)
