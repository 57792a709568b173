"""Decides whether a repair is right. The candidate's code runs in the sandbox; what is right never goes there.

Hidden calls are compared in this process, as plain data, with values that were computed before. Nothing that the
candidate prints, patches or exits with can say more than "this call gave this value".
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sao_core.environments.code_repair.outcomes import Expected, Outcome
from sao_core.environments.code_repair.repair_task import HiddenCases, HiddenTests, RepairTask
from sao_core.environments.code_repair.sandboxed import program
from sao_core.environments.code_repair.sandboxed.calls import decode, encode
from sao_core.environments.code_repair.test_names import named_tests
from sao_core.environments.code_repair.test_runs import TestRun, run_tests
from sao_core.environments.code_repair.workspace import without_tests
from sao_core.outside import CodeRunner, Limits, StoppedBy


class SandboxBroke(RuntimeError):
    """The sandbox failed, not the candidate: the rollout cannot be judged."""


@dataclass(frozen=True)
class Verdict:
    """What a repair is worth."""

    solved: bool
    hidden_passed: int
    hidden_total: int
    gained: float
    """Of the hidden checks that the broken version fails, the share that pass beyond those it passed; 0 … 1."""


async def judge(
    runner: CodeRunner, task: RepairTask, files: Mapping[str, str], limits: Limits, *, gain: bool = False
) -> Verdict:
    """Judge the ``files`` that a policy left behind; ``gain`` asks for :attr:`Verdict.gained` of unsolved ones.

    Raises :class:`SandboxBroke`.
    """
    if isinstance(task.check, HiddenCases):
        return await _judge_cases(runner, task.check, without_tests(files), limits)
    return await _judge_tests(runner, task, task.check, files, limits, gain)


def _verdict(visible: Iterable[bool], hidden: Sequence[bool], before: int) -> Verdict:
    passed = sum(hidden)
    solved = all(visible) and passed == len(hidden)
    gained = 1.0 if solved else max(0, passed - before) / max(1, len(hidden) - before)
    return Verdict(solved, passed, len(hidden), gained)


async def _judge_cases(runner: CodeRunner, check: HiddenCases, files: Mapping[str, str], limits: Limits) -> Verdict:
    visible = len(check.visible)
    expected = (*check.visible, *check.hidden)
    outcomes = await call(runner, check.modules, expected, files, limits)
    met = [one.met_by(outcome) for one, outcome in zip(expected, outcomes, strict=True)]
    return _verdict(met[:visible], met[visible:], check.passed_broken)


async def call(
    runner: CodeRunner,
    modules: Mapping[str, str],
    expected: Sequence[Expected],
    files: Mapping[str, str],
    limits: Limits,
) -> list[Outcome | None]:
    """What the candidate makes of each call; None where it gave no answer that could be read."""
    calls = [[modules[one.case.function], one.case.function, encode(one.case.arguments)] for one in expected]
    ran = await runner.run(program("calls"), files=files, stdin=json.dumps({"calls": calls}) + "\n", limits=limits)
    if ran.stopped_by is StoppedBy.SANDBOX:
        raise SandboxBroke(f"the sandbox broke while a repair was judged: {ran.stderr[-200:]}")
    outcomes: list[Outcome | None] = [None] * len(expected)
    for line in ran.stdout.splitlines():
        read = _read(line)
        if read is not None and 0 <= read[0] < len(outcomes) and outcomes[read[0]] is None:
            outcomes[read[0]] = read[1]
    return outcomes


def _read(line: str) -> tuple[int, Outcome] | None:
    """One answer; None for anything that no honest program writes."""
    try:
        index, came = json.loads(line, parse_constant=_refuse)
        if type(index) is not int or "missing" in came:
            return None
        changed = came["changed"] is not False
        if "raised" in came:
            return index, Outcome(raised=tuple(map(str, came["raised"])), changed_arguments=changed)
        return index, Outcome(decode(came["value"]), changed_arguments=changed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


async def _judge_tests(
    runner: CodeRunner, task: RepairTask, check: HiddenTests, files: Mapping[str, str], limits: Limits, gain: bool
) -> Verdict:
    """Run the author's own copies of all tests, on the repair and, for the gain, on the repository as it was given."""
    visible, hidden = (named_tests(tests, check.runner) for tests in (check.visible, check.hidden))
    paths = sorted(visible.keys() | hidden.keys())

    async def run(sources: Mapping[str, str]) -> TestRun:
        taken = {**without_tests(sources, keep=task.files), **check.visible, **check.hidden}
        token = secrets.token_hex(16)
        ran = await run_tests(runner, taken, paths, check.runner, limits, token=token, packages=True)
        if ran.broke:
            raise SandboxBroke(f"the sandbox broke while a repair was judged: {ran.broke}")
        return ran

    def passed(ran: TestRun, tests: Mapping[str, Sequence[str]]) -> list[bool]:
        return [ran.passed(path, name) for path, names in tests.items() for name in names]

    after = await run(files)
    before = 0
    if gain and not after.clean:
        before = sum(passed(await run(task.files), hidden))
    return _verdict([after.clean, *passed(after, visible)], passed(after, hidden), before)
