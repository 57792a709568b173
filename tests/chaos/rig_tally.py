"""The account of a chaos session: every kill by its place, and what was lost by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rig import Result


@dataclass
class Tally:
    """What all tests of a session did to their processes, and what was lost by it."""

    kills: Counter[str] = field(default_factory=Counter)
    recorded: int = 0
    lost: int = 0
    trained_twice: int = 0

    def add(self, result: Result) -> None:
        """Count in what came of a rig."""
        self.kills.update(result.kills)
        self.recorded += result.recorded
        self.lost += len(result.lost)
        self.trained_twice += len(result.trained_twice)

    def __str__(self) -> str:
        points = ", ".join(f"{count} {point}" for point, count in sorted(self.kills.items()))
        return (
            f"chaos: {self.kills.total()} kills survived ({points}), trajectories recorded {self.recorded}, "
            f"lost {self.lost}, trained twice {self.trained_twice}"
        )
