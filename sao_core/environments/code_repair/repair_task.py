"""A repair task as the environment serves it: files, what is asked, and how a repair is checked out of reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sao_core.environments.code_repair.outcomes import Expected


@dataclass(frozen=True)
class HiddenCases:
    """Checked by calls: the sandbox gets arguments and gives values, which are compared here."""

    modules: Mapping[str, str]
    """Function → the module that it is in."""
    visible: tuple[Expected, ...]
    """The calls that the tests of the repository make."""
    hidden: tuple[Expected, ...]
    passed_broken: int
    """Hidden calls that the repository as given gets right."""


@dataclass(frozen=True)
class HiddenTests:
    """Checked by test files of the task's author, which run in the sandbox beside the candidate's sources."""

    visible: Mapping[str, str]
    hidden: Mapping[str, str]
    """Path → text."""
    runner: str
    """`unittest` or `pytest`."""


@dataclass(frozen=True)
class Mistake:
    """What is wrong with a bundled task's repository: for demonstrations and people."""

    path: str
    function: str
    kind: str
    wrong: str
    right: str
    """The function's source with the mistake and without it."""


@dataclass(frozen=True)
class RepairTask:
    """One repository to mend."""

    files: Mapping[str, str]
    """Path → text: sources and visible tests."""
    request: str
    """What the user asks for."""
    check: HiddenCases | HiddenTests
    mistake: Mistake | None = None
