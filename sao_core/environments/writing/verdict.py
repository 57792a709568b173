"""What a judge finds of a text, and what judges are: the preference itself is none of their business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Assignment:
    """What was to be written."""

    pool: tuple[str, ...]
    """The styles to choose from."""
    subject: tuple[str, ...]
    """Words that have to appear."""
    words: tuple[int, int]
    """Fewest and most words."""
    prompt: str
    """All that the writer was told, as one text."""


@dataclass(frozen=True)
class Verdict:
    """Quality and style of a text."""

    fault: str | None
    """The first thing that is wrong with it as a text; None: its quality is good."""
    style: str | None
    """The one style that it is written in; None if there is none, or more than one."""


class Judge(Protocol):
    """Reads a text and tells its quality and its style."""

    async def judge(self, text: str, assignment: Assignment) -> Verdict:
        """The verdict; raises if there can be none, which must never count as a bad text."""
        ...
