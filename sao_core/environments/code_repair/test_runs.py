"""Runs test files in the sandbox, and says what came of them in a few lines that are the same every time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sao_core.environments.code_repair.sandboxed import program
from sao_core.outside import CodeRunner, Limits, StoppedBy

_SHOWN = 8
_LINE = 240
_STOPPED = {
    StoppedBy.WALL: "they did not end in time: {wall:g} s",
    StoppedBy.CPU: "they did not end in time: {cpu:g} s of CPU",
    StoppedBy.MEMORY: "they used too much memory",
    StoppedBy.OUTPUT: "they wrote too much",
}


@dataclass(frozen=True)
class TestRun:
    """What a run of tests reported."""

    __test__ = False
    results: Mapping[str, str] = field(default_factory=dict)
    """``path::test`` → its problem in one line; empty where it passed."""
    problem: str = ""
    """Why the run did not come to its end; empty if it did."""
    broke: str = ""
    """How the sandbox failed, which says nothing about the tests."""

    def passed(self, path: str, name: str) -> bool:
        """Whether a test ran, with every set of parameters, and passed."""
        test = f"{path}::{name}"
        problems = [problem for key, problem in self.results.items() if key == test or key.startswith(f"{test}[")]
        return bool(problems) and not any(problems)

    @property
    def clean(self) -> bool:
        """Whether the run came to its end and nothing in it failed."""
        return not (self.problem or self.broke) and not any(self.results.values())


async def run_tests(
    runner: CodeRunner,
    files: Mapping[str, str],
    paths: Sequence[str],
    test_runner: str,
    limits: Limits,
    *,
    token: str = "",
    packages: bool = False,
) -> TestRun:
    """Run the test files ``paths`` out of ``files``; lines that do not bring the ``token`` are nobody's."""
    request = {"files": list(paths), "runner": test_runner, "token": token}
    command = program("tests", packages)
    ran = await runner.run(command, files=files, stdin=json.dumps(request) + "\n", limits=limits)
    if ran.stopped_by is StoppedBy.SANDBOX:
        return TestRun(broke=ran.stderr[-_LINE:] or "no reason given")
    results: dict[str, str] = {}
    ended = False
    for line in ran.stdout.splitlines():
        test, problem = _read(line, token)
        if test:
            results[test] = results.get(test) or problem
        elif test is not None:
            ended = True
    stopped = ""
    if ran.stopped_by is not None:
        stopped = _STOPPED[ran.stopped_by].format(wall=limits.wall_s, cpu=limits.cpu_s)
    elif not ended:
        stopped = "the program ended before the tests did"
    return TestRun(results, stopped)


def _read(line: str, token: str) -> tuple[str | None, str]:
    try:
        given, test, problem = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None, ""
    if given != token or not (isinstance(test, str) and isinstance(problem, str)):
        return None, ""
    return test, problem


def report(run: TestRun) -> str:
    """At most a dozen lines for the policy to read: how many, which failed, and why."""
    if run.broke:
        return "error: the tests could not be run; try again"
    failed = {test: problem for test, problem in sorted(run.results.items()) if problem}
    count = len(run.results)
    lines = [f"{count} test{'' if count == 1 else 's'}, {len(failed)} failed"]
    for test, problem in list(failed.items())[:_SHOWN]:
        line = f"FAIL {test.replace('::', ' ')}: {problem}"
        lines.append(line if len(line) <= _LINE else f"{line[: _LINE - 1]}…")
    if len(failed) > _SHOWN:
        lines.append(f"and {len(failed) - _SHOWN} more")
    if run.problem:
        lines.append(f"not all tests ran: {run.problem}")
    return "\n".join(lines)
