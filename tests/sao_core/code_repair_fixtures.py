"""What the tests of `code_repair` share: a code runner without isolation, and an episode played by a script."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sao_core.environments import get
from sao_core.environments.base import Task
from sao_core.environments.code_repair.outcomes import Case, Expected
from sao_core.environments.code_repair.repair_task import HiddenCases, RepairTask
from sao_core.outside import Limits, Outside, Ran, StoppedBy
from sao_core.tool_calls import ToolCall, write_tool_calls

SPEC = get("code_repair")


class Subprocesses:
    """Runs programs as plain child processes in a folder that goes away: for code of these tests only."""

    def __init__(self):
        self.runs = []

    async def run(self, argv, *, files=None, stdin="", limits=None, collect=()):
        limits = limits or Limits()
        self.runs.append({"argv": argv, "files": dict(files or {}), "stdin": stdin})
        return await asyncio.to_thread(self._run, argv, files or {}, stdin, limits)

    def _run(self, argv, files, stdin, limits):
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                place = Path(folder, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
            started = time.monotonic()
            child = subprocess.Popen(
                [sys.executable if part == "python" else part for part in argv],
                cwd=folder,
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stopped = None
            try:
                out, err = child.communicate(stdin, timeout=limits.wall_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, err = child.communicate()
                stopped = StoppedBy.WALL
            if len(out) > limits.output_bytes:
                out, stopped = out[: limits.output_bytes], StoppedBy.OUTPUT
            code = child.returncode if child.returncode >= 0 else None
            return Ran(code, out, err, time.monotonic() - started, stopped)


class Broken:
    """A sandbox that does not work."""

    async def run(self, argv, **_):
        return Ran(None, "", "no room left", 0.0, StoppedBy.SANDBOX)


def call(name, **arguments):
    return write_tool_calls([ToolCall(name, arguments)])


def turns_of(changes):
    """The turns that make changes: path → text, None to delete."""
    return [
        call("delete_file", path=path) if text is None else call("write_file", path=path, content=text)
        for path, text in changes.items()
    ]


def environment(runner, **options):
    return SPEC.make(SPEC.parse_options(options), Outside(code_runner=runner))


def play(task, turns, runner=None, **options):
    """The results of all turns; a turn is a text, or a list of calls as (name, arguments)."""

    async def episode():
        playing = environment(runner or Subprocesses(), **options)
        await playing.reset(task)
        results = [await playing.step(turn) for turn in turns]
        await playing.close()
        return results

    return asyncio.run(episode())


def bundled(key="train/0", seed=0, **options):
    return SPEC.tasks(SPEC.parse_options(options), seed).task(key)


def fixed(task):
    """The source file that holds the mistake, without it: path and text."""
    repair = task.data["repair"]
    mistake = repair.mistake
    broken = repair.files[mistake.path]
    return mistake.path, broken.replace(mistake.wrong.rstrip("\n"), mistake.right.rstrip("\n"))


def adding(source="def add(a, b):\n    return a - b\n", hidden=((20, 1), (7, 7), (0, 0), (90210, 55555))):
    """A task by hand: `add` subtracts; the visible tests call it with (1, 2) and (2, 0)."""
    expected = [Expected(Case("add", pair), sum(pair)) for pair in ((1, 2), (2, 0), *hidden)]
    tests = "import unittest\n\nfrom adding import add\n\n\nclass AddTest(unittest.TestCase):\n"
    for number, pair in enumerate(((1, 2), (2, 0)), start=1):
        tests += f"    def test_add_{number}(self):\n        self.assertEqual(add{pair}, {sum(pair)})\n"
    check = HiddenCases({"add": "adding"}, tuple(expected[:2]), tuple(expected[2:]), passed_broken=1)
    files = {"adding.py": source, "tests/test_adding.py": tests}
    return Task("hand", "easy", {"repair": RepairTask(files, "add is wrong", check)})
