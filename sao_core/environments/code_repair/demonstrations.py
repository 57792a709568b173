"""A demonstrator for bundled tasks: it looks, edits, tests and submits, and often enough mends the wrong thing.

It works on mutants of the catalogue only, so its tests run in this process. What is left to learn from rewards is
which edit is right; how to work is shown every time.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from sao_core.environments.base import random_of
from sao_core.environments.code_repair.bundled import BundledTasks
from sao_core.environments.code_repair.catalogue import functions
from sao_core.environments.code_repair.environment import TOOLS, opening
from sao_core.environments.code_repair.levels import Level
from sao_core.environments.code_repair.mutants import mutants_of
from sao_core.environments.code_repair.options import CodeRepairOptions
from sao_core.environments.code_repair.outcomes import Expected
from sao_core.environments.code_repair.repair_task import HiddenCases, Mistake, RepairTask
from sao_core.environments.code_repair.test_runs import TestRun, report
from sao_core.environments.code_repair.trials import DoesNotEnd, Program, program
from sao_core.environments.code_repair.workspace import Workspace
from sao_core.trajectory import Message, Role

_LONGEST_EDIT = 3
"""Lines that a wrong fix may touch: others look like nobody's."""

Edit = tuple[str, str]
"""Text to replace, and what to put in its place."""


def demonstrations(options: CodeRepairOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` repairs of bundled tasks; how often the fix is the right one goes by level."""
    tasks = BundledTasks(options.levels, None, seed)
    rates = dict(zip(Level, options.right_fix, strict=True))
    for index in range(count):
        task = tasks.task(f"demonstration/{index}")
        rng = random_of("code_repair demonstrator", seed, index)
        repair: RepairTask = task.data["repair"]
        right = rng.random() < rates[Level(task.difficulty)]
        yield tuple(_conversation(rng, repair, options, right))


def _conversation(rng: random.Random, task: RepairTask, options: CodeRepairOptions, right: bool) -> Iterator[Message]:
    mistake, check = task.mistake, task.check
    if mistake is None or not isinstance(check, HiddenCases):
        raise ValueError("only bundled tasks can be demonstrated")
    files = Workspace(task.files)
    first, *rest = opening(task, options)
    yield Message(first.role, first.content, {"tools": list(TOOLS)} if options.show_tools else {})
    yield from rest
    turns = 0

    def turn(name: str, shown: str, **arguments: str) -> Iterator[Message]:
        nonlocal turns
        turns += 1
        call_id = f"call{turns:03d}00"
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        yield Message(Role.ASSISTANT, "", {"tool_calls": [call]})
        yield Message(Role.TOOL, shown, {"name": name, "tool_call_id": call_id})

    yield from turn("list_files", files.listing())
    yield from turn("read_file", files.read(mistake.path, options.max_read_chars), path=mistake.path)
    source = mistake.right if right else _wrong_fix(rng, mistake, check)
    if source != mistake.wrong:
        before = task.files[mistake.path]
        old, new = smallest_edit(before, before.replace(mistake.wrong.rstrip("\n"), source.rstrip("\n")))
        files.replace(mistake.path, old, new)
        yield from turn("replace_text", "done", path=mistake.path, old=old, new=new)
    yield from turn("run_tests", report(tests_in_process(check, mistake.function, source)))
    yield from turn("submit", "")


def _wrong_fix(rng: random.Random, mistake: Mistake, check: HiddenCases) -> str:
    """Another mistake in the place of the first, in the same line if it can be; if not at all, the first one stays."""
    others = []
    for mutant in mutants_of(mistake.right):
        if mutant.source != mistake.wrong:
            old, new = smallest_edit(mistake.wrong, mutant.source)
            lines = 1 + max(old.count("\n"), new.count("\n"))
            if lines <= _LONGEST_EDIT:
                others.append((lines, rng.random(), mutant.source))
    for _, _, source in sorted(others):
        if _is_wrong(check, mistake.function, source):
            return source
    return mistake.wrong


def _is_wrong(check: HiddenCases, function: str, source: str) -> bool:
    """Whether a hidden call shows it; what is no Python, or does not end, is left to nobody."""
    try:
        running = _running(check, function, source)
        for one in check.visible:
            running.call(one.case)
        return any(not one.met_by(running.call(one.case)) for one in check.hidden)
    except (SyntaxError, DoesNotEnd):
        return False


def smallest_edit(before: str, after: str) -> Edit:
    """Whole lines to replace, once in ``before``, so that it becomes ``after``; as few as tell the place."""
    old, new = before.split("\n"), after.split("\n")
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    kept = 0
    while kept < min(len(old), len(new)) - start and old[-1 - kept] == new[-1 - kept]:
        kept += 1
    while True:
        text = "\n".join(old[start : len(old) - kept])
        if text.strip() and before.count(text) == 1:
            return text, "\n".join(new[start : len(new) - kept])
        if start > 0:
            start -= 1
        elif kept > 0:
            kept -= 1
        else:
            raise ValueError("there is nothing to replace")


def tests_in_process(check: HiddenCases, function: str, source: str) -> TestRun:
    """What running the visible tests would report if ``function`` had this ``source``, which ends in all of them."""
    running = _running(check, function, source)
    numbers = dict.fromkeys(check.modules, 0)
    results = {}
    for one in check.visible:
        name = one.case.function
        numbers[name] += 1
        module = check.modules[name]
        title = f"{module.title().replace('_', '')}Test"
        results[f"tests/test_{module}.py::{title}::test_{name}_{numbers[name]}"] = _problem(one, running)
    return TestRun(results)


def _running(check: HiddenCases, function: str, source: str) -> Program:
    return program([functions()[name] for name in check.modules], (function, source))


def _problem(one: Expected, running: Program) -> str:
    """What the visible test of a call would say."""
    outcome = running.call(one.case)
    if outcome.raised:
        text = f"{outcome.raised[0]}: {outcome.message}" if outcome.message else outcome.raised[0]
        return "" if one.raises in outcome.raised else text
    if one.raises:
        return f"AssertionError: {one.raises} not raised"
    test = unittest.TestCase()
    equal: Callable[[Any, Any], None] = test.assertEqual
    try:
        (test.assertAlmostEqual if isinstance(one.value, float) else equal)(outcome.value, one.value)
        equal(outcome.arguments if outcome.changed_arguments else one.case.arguments, one.case.arguments)
    except (AssertionError, TypeError) as error:  # None is not almost equal to anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""
