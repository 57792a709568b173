"""Starts the user's own agent programs beside a worker's event loop, each under a guard of its own.

The guard (:mod:`infra.agent_guard`) does what takes time, and outlives neither its program nor this process. Variables
that say where this installation keeps its state, or with which keys, are not handed down.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from infra import agent_guard
from sao_core.agent_programs import ProgramEnded

_PRIVATE = ("SAO_", "PREFECT_", "MLFLOW_", "AWS_", "PG")
_REPORT_BYTES = 16 * 2**20
"""More than a report can have, however its text is escaped."""


class AgentPrograms:
    """Starts programs; see :class:`sao_core.agent_programs.Programs`.

    Words of a command that name a file in ``folder`` (default: the working directory) stand for that file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or Path.cwd()).absolute()

    @asynccontextmanager
    async def start(
        self, command: Sequence[str], task: Mapping[str, Any], variables: Mapping[str, str]
    ) -> AsyncIterator[AgentProgram]:
        """Start a program; it is gone at the end of the context."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            agent_guard.__file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=_environment(os.environ, variables),
            limit=_REPORT_BYTES,
        )
        program = AgentProgram(process)
        try:
            start = {"argv": [self._word(word, first=not n) for n, word in enumerate(command)], "task": task}
            await program.tell(start)
            yield program
        finally:
            program.hang_up()
            await process.wait()

    def _word(self, word: str, first: bool) -> str:
        if first and word in ("python", "python3"):
            return sys.executable
        with suppress(OSError, ValueError):  # too long, or with a NUL: no file's name
            if not word.startswith("-") and (self._folder / word).is_file():
                return str(self._folder / word)
        return word


class AgentProgram:
    """One program and its guard."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ended: ProgramEnded | None = None
        self._reading = asyncio.Lock()

    async def tell(self, start: Mapping[str, Any]) -> None:
        """Tell the guard what to start."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(start).encode() + b"\n")
        with suppress(ConnectionError):  # the guard is gone, which its report will lack
            await self._process.stdin.drain()

    def hang_up(self) -> None:
        """Have the guard kill whatever still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> ProgramEnded:
        """Wait until it ends by itself; whatever it started is gone then as well."""
        assert self._process.stdout is not None
        async with self._reading:
            if self._ended is None:
                line = await self._process.stdout.readline()
                self._ended = _report(json.loads(line) if line.endswith(b"\n") else {"problem": "its guard was killed"})
        return self._ended

    async def stop(self) -> ProgramEnded:
        """Kill it with all that it started."""
        self.hang_up()
        return await self.wait()


def _report(report: Mapping[str, Any]) -> ProgramEnded:
    return ProgramEnded(
        exit_code=report.get("exit_code"),
        stdout=report.get("stdout", ""),
        stderr=report.get("stderr", ""),
        result=report.get("result"),
        problem=report.get("problem"),
    )


def _environment(mine: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """What a program inherits, and what it is given; the policy is never behind a proxy."""
    kept = {name: value for name, value in mine.items() if not name.startswith(_PRIVATE)}
    direct = {
        name: ",".join(filter(None, [mine.get(name), "127.0.0.1,localhost"])) for name in ("NO_PROXY", "no_proxy")
    }
    return {**kept, **direct, **given}
