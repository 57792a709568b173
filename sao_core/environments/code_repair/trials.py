"""Runs functions of the catalogue and their mutants in this process: to know what is right, and what a mistake does.

Only code of the catalogue and its mutants gets here, never a policy's. Loops count their rounds and look at what has
grown, so a mutant that would not end, or would fill the memory, is stopped at the same point on every machine.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import lru_cache
from types import CodeType
from typing import Any

from sao_core.environments.code_repair.catalogue import Function
from sao_core.environments.code_repair.outcomes import Case, Expected, Outcome

_MOST_ROUNDS = 3000
_LARGEST = 5000
"""Of what a variable may hold: items of a list or characters of a text."""
_GROWING = {list, str, dict, set}
_TICK = "__tick__"


class DoesNotEnd(BaseException):
    """A call went round its loops more often, or gathered more, than any correct one does."""


class Program:
    """Functions that call each other, in a namespace of their own."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._rounds = 0
        self._names: dict[str, Any] = {_TICK: self._tick}
        for source in sources:
            exec(_counting(source), self._names)

    def call(self, case: Case) -> Outcome:
        """Call it on a copy of the arguments. Raises :class:`DoesNotEnd`."""
        self._rounds = 0
        function: Callable[..., Any] = self._names[case.function]
        arguments = deepcopy(case.arguments)
        value, raised, message = None, tuple[str, ...](), ""
        try:
            value = deepcopy(function(*arguments))
        except Exception as error:  # whatever a mutant raises is its outcome
            raised, message = tuple(kind.__name__ for kind in type(error).__mro__), str(error)
        return Outcome(value, raised, message, arguments != case.arguments, arguments)

    def _tick(self) -> None:
        self._rounds += 1
        if self._rounds > _MOST_ROUNDS:
            raise DoesNotEnd
        for value in sys._getframe(1).f_locals.values():
            if type(value) in _GROWING and len(value) > _LARGEST:
                raise DoesNotEnd


def program(functions: Sequence[Function], mutant: tuple[str, str] | None = None) -> Program:
    """The functions and their helpers as a program; ``mutant`` is a name and the source to take instead."""
    name, wrong = mutant or ("", "")
    everything = {f.name: f for function in functions for f in (*function.helpers, function)}
    imports = dict.fromkeys(line for f in everything.values() for line in f.imports)
    return Program([*imports, *(wrong if f.name == name else f.source for f in everything.values())])


def expected(right: Program, case: Case) -> Expected:
    """What the correct functions make of a call."""
    outcome = right.call(case)
    if outcome.changed_arguments:
        raise ValueError(f"{case.function} changes its arguments, which no function of the catalogue may")
    return Expected(case, outcome.value, outcome.raised[0] if outcome.raised else "")


@lru_cache(maxsize=4096)
def _counting(source: str) -> CodeType:
    """The compiled source with a call at the start of every function and round. Raises SyntaxError."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.For | ast.While):
            node.body.insert(0, ast.Expr(ast.Call(ast.Name(_TICK, ast.Load()), [], [])))
    return compile(ast.fix_missing_locations(tree), "<catalogue>", "exec")
