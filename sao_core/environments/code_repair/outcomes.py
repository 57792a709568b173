"""What a call of a function came to, and whether two such outcomes count as the same.

Values are plain data by the time they get here: nothing that is compared has a method of the candidate's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """A call: the function by its name, and its arguments."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    value: Any = None
    raised: tuple[str, ...] = ()
    """Names of the exception's class and of those it descends from; empty if it returned."""
    message: str = ""
    """What the exception says."""
    changed_arguments: bool = False
    arguments: Any = None
    """What the arguments were after the call, where that was looked at."""


@dataclass(frozen=True)
class Expected:
    """A call and the outcome that is right; a function never changes its arguments."""

    case: Case
    value: Any = None
    raises: str = ""
    """The name of the exception that the specification asks for; empty if it asks for a value."""

    def met_by(self, outcome: Outcome | None) -> bool:
        """Whether an outcome (None: there was none) is the right one."""
        if outcome is None or outcome.changed_arguments:
            return False
        if self.raises or outcome.raised:
            return bool(self.raises) and self.raises in outcome.raised
        return same(self.value, outcome.value)


def same(expected: Any, got: Any) -> bool:
    """Equality as Python has it for plain data, with room for the last digits of floats; NaN equals nothing."""
    if isinstance(expected, float) or isinstance(got, float):
        if isinstance(expected, bool) or isinstance(got, bool):
            return False
        if not (isinstance(expected, int | float) and isinstance(got, int | float)):
            return False
        return math.isclose(expected, got, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list | tuple):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        return expected.keys() == got.keys() and all(same(value, got[key]) for key, value in expected.items())
    return bool(expected == got)
