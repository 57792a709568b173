"""Makes a repair task from functions of the catalogue: breaks one, proves that tests show it, and writes a repository.

Everything follows from the random generator given. A task leaves here only if a visible test fails on the broken
version, hidden calls tell it from the right one, and no call takes part in both.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sao_core.environments.code_repair.catalogue import Function, functions
from sao_core.environments.code_repair.levels import SHAPES, Level, Shape
from sao_core.environments.code_repair.mutants import Mutant, mutants_of
from sao_core.environments.code_repair.outcomes import Case, Expected, Outcome
from sao_core.environments.code_repair.repair_task import HiddenCases, Mistake, RepairTask
from sao_core.environments.code_repair.repository import (
    VisibleTest,
    source_files,
    source_path,
    test_files,
    test_path,
)
from sao_core.environments.code_repair.trials import DoesNotEnd, Program, expected, program

_LOOK = 24
"""Calls that a mutant is first judged by."""
_CALLS = 72
_HIDDEN_FAILING, _HIDDEN_PASSING = 8, 12
_FEWEST_HIDDEN_FAILING = 3
_DIRECT = 6
"""Hidden calls of a broken helper itself, where the visible tests only call its caller."""
_MUTANTS_TRIED = 12
_FUNCTIONS_TRIED = 200
_CRASHES = {"TypeError", "NameError", "UnboundLocalError", "AttributeError"}
_MOSTLY = 0.8


@dataclass(frozen=True)
class _Broken:
    """A mistake together with the calls that show it."""

    tested: Function
    function: Function
    mutant: Mutant
    visible: tuple[VisibleTest, ...]
    hidden: tuple[Expected, ...]
    failing: str
    """Name of the first visible test that fails."""


def generate(rng: random.Random, level: Level, pool: Sequence[Function]) -> RepairTask:
    """A task of a level from functions of ``pool``."""
    shape = SHAPES[level]
    broken = _break_something(rng, shape, pool)
    chosen = _choose(rng, shape, pool, broken.tested)
    others = [f for f in chosen if f is not broken.function and f is not broken.tested and f in pool]
    visible, hidden = list(broken.visible), list(broken.hidden)
    for function in others:
        calls = _calls(rng, function, 2)
        hidden += calls[1:]
        if function not in broken.tested.helpers or shape.behind_caller == 0:
            visible.append(VisibleTest(1, calls[0], False))
    name, source = broken.function.name, broken.mutant.source
    modules = {f.name: f.module for f in chosen}
    files = source_files(chosen, {name: source}) | test_files(visible, modules)
    wrong = program(chosen, (name, source))
    passed = sum(call.met_by(_outcome(wrong, call.case)) for call in hidden)
    return RepairTask(
        files=files,
        request=_request(files, broken, shape.named),
        check=HiddenCases(modules, tuple(test.expected for test in visible), tuple(hidden), passed),
        mistake=Mistake(source_path(broken.function.module), name, broken.mutant.kind, source, broken.function.source),
    )


def _break_something(rng: random.Random, shape: Shape, pool: Sequence[Function]) -> _Broken:
    callers = [function for function in pool if function.helpers]
    for _ in range(_FUNCTIONS_TRIED):
        if rng.random() < shape.behind_caller:
            tested = rng.choice(callers)
            function = rng.choice(tested.helpers)
        else:
            tested = function = rng.choice(pool)
        calls = _calls(rng, tested, _CALLS)
        for mutant in _some_mutants(rng, function):
            broken = _try(rng, shape, tested, function, mutant, calls)
            if broken is not None:
                return broken
    raise RuntimeError(f"no mistake in {_FUNCTIONS_TRIED} functions shows on {shape.shows} of their inputs")


def _some_mutants(rng: random.Random, function: Function) -> Iterator[Mutant]:
    """A few in random order. A kind that could be made in four times as many places is twice as likely."""
    kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants_of(function.source):
        kinds[mutant.kind].append(mutant)
    for _ in range(_MUTANTS_TRIED):
        if kinds:
            kind = rng.choices(list(kinds), [math.sqrt(len(mutants)) for mutants in kinds.values()])[0]
            yield kinds[kind].pop(rng.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]


def _try(
    rng: random.Random,
    shape: Shape,
    tested: Function,
    function: Function,
    mutant: Mutant,
    calls: Sequence[Expected],
) -> _Broken | None:
    """The mistake with its calls, or None if it does not suit."""
    change = (function.name, mutant.source)
    try:
        wrong = program([tested], change)
        outcomes = [wrong.call(call.case) for call in calls[:_LOOK]]
        if not _suits(shape, calls, outcomes):
            return None
        outcomes += [wrong.call(call.case) for call in calls[_LOOK:]]
    except (SyntaxError, DoesNotEnd):
        return None
    judged = list(zip(calls, outcomes, strict=True))
    failing = [pair for pair in judged if not pair[0].met_by(pair[1])]
    passing = [pair for pair in judged if pair[0].met_by(pair[1])]
    shown = failing[: rng.randint(1, 2)] + passing
    shown = (shown + failing[2:])[: shape.tests]
    rng.shuffle(shown)
    visible = tuple(VisibleTest(n, call, got.changed_arguments) for n, (call, got) in enumerate(shown, start=1))
    unseen_failing = [call for call, got in failing if (call, got) not in shown][:_HIDDEN_FAILING]
    unseen_passing = [call for call, got in passing if (call, got) not in shown][:_HIDDEN_PASSING]
    hidden = unseen_failing + unseen_passing
    if tested is not function:
        hidden += _calls(rng, function, _DIRECT)
    rng.shuffle(hidden)
    try:
        failing_tests = _failing(program([tested], change), [test.expected for test in visible])
        failing_hidden = _failing(program([tested], change), hidden)
    except DoesNotEnd:
        return None
    if not failing_tests or len(failing_hidden) < _FEWEST_HIDDEN_FAILING:
        return None
    return _Broken(tested, function, mutant, visible, tuple(hidden), visible[failing_tests[0]].name)


def _suits(shape: Shape, calls: Sequence[Expected], outcomes: Sequence[Outcome]) -> bool:
    """Whether the mistake shows as often as it should, and not just by a crash that no version of anyone's had."""
    wrong = [got for call, got in zip(calls, outcomes, strict=False) if not call.met_by(got)]
    if not wrong or not shape.shows[0] <= len(wrong) / len(outcomes) <= shape.shows[1]:
        return False
    crashes = sum(bool(_CRASHES & set(got.raised)) for got in wrong)
    return crashes < _MOSTLY * len(wrong)


def _failing(wrong: Program, calls: Sequence[Expected]) -> list[int]:
    return [index for index, call in enumerate(calls) if not call.met_by(wrong.call(call.case))]


def _outcome(wrong: Program, case: Case) -> Outcome | None:
    try:
        return wrong.call(case)
    except DoesNotEnd:
        return None


def _calls(rng: random.Random, function: Function, count: int) -> list[Expected]:
    """At most ``count`` different calls with the right outcomes; fewer if the function has fewer inputs."""
    right = _right(function.name)
    calls: dict[str, Expected] = {}
    for _ in range(2 * count):
        arguments = function.entry.draw(rng)
        if len(calls) < count and repr(arguments) not in calls:
            calls[repr(arguments)] = expected(right, Case(function.name, arguments))
    return list(calls.values())


@lru_cache(maxsize=256)
def _right(name: str) -> Program:
    return program([functions()[name]])


def _choose(rng: random.Random, shape: Shape, pool: Sequence[Function], tested: Function) -> list[Function]:
    """The functions of the repository, in the order of the catalogue, helpers included."""
    names = {tested.name}
    others = sorted({f.module for f in pool} - {tested.module})
    for module in (tested.module, *rng.sample(others, rng.randint(*shape.modules) - 1)):
        here = [f for f in pool if f.module == module and f is not tested]
        wanted = rng.randint(*shape.functions) - (module == tested.module)
        names.update(f.name for f in rng.sample(here, min(wanted, len(here))))
    names.update(helper.name for name in list(names) for helper in functions()[name].helpers)
    return [function for function in functions().values() if function.name in names]


def _request(files: dict[str, str], broken: _Broken, named: bool) -> str:
    lines = [
        "A test of this small Python repository fails. Find the mistake in the source and mend it: the docstrings say "
        "what is right. Other tests, which you cannot see, decide whether it is mended; changing the tests does not "
        "help. Call submit when you are done.",
        "",
        "Files:",
        *sorted(files),
    ]
    if named:
        lines += ["", f"Failing test: {broken.failing} in {test_path(broken.tested.module)}"]
    return "\n".join(lines)
