"""Difficulty of a bundled task: how large the repository is, how often the mistake shows, and what the tests tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """What tasks are reported by."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"


@dataclass(frozen=True)
class Shape:
    """What the tasks of a level look like."""

    modules: tuple[int, int]
    """Fewest and most source files."""
    functions: tuple[int, int]
    """Fewest and most functions per file, helpers aside."""
    shows: tuple[float, float]
    """Smallest and largest share of inputs on which the mistake shows."""
    tests: int
    """Visible tests of the function."""
    behind_caller: float
    """How often the mistake is in a helper, and the tests only call the function that uses it."""
    named: bool
    """The task says which test fails."""


SHAPES: Mapping[Level, Shape] = {
    Level.EASY: Shape((1, 1), (1, 2), (0.35, 1.0), 3, 0.0, True),
    Level.MEDIUM: Shape((2, 2), (2, 3), (0.15, 0.7), 4, 0.15, True),
    Level.HARD: Shape((3, 4), (2, 4), (0.04, 0.4), 5, 0.35, False),
}
