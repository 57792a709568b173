"""What a catalogue says of a function: how its arguments are drawn, and which others it stands on.

The functions are pure, small and correct; their docstrings are their specifications, with examples that are tested.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One function of a catalogue."""

    function: Callable[..., Any]
    draw: Callable[[random.Random], tuple[Any, ...]]
    """Arguments at random: small ones, edges included, of None, bool, int, float, str, list, tuple, dict and set."""
    helpers: tuple[Callable[..., Any], ...] = ()
    """Functions of the same catalogue that it calls."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__
