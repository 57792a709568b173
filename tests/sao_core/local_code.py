"""Runs code in a plain child process, for tests of environments that need a code runner: no isolation, a wall limit."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sao_core.outside import Limits, Ran, StoppedBy

_CELLS = """
import ast, contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    out, err, code = io.StringIO(), "", 0
    with contextlib.redirect_stdout(out):
        try:
            body = ast.parse(json.loads(line)).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                if value is not None:
                    print(repr(value))
        except Exception:
            err, code = traceback.format_exc(limit=0), 1
    print(json.dumps([code, out.getvalue(), err]), flush=True)
"""


class LocalSession:
    def __init__(self, child: asyncio.subprocess.Process, limits: Limits) -> None:
        self._child, self._limits, self._over = child, limits, False
        self.closed = 0

    async def run(self, code: str, wall_s: float | None = None) -> Ran:
        started = time.monotonic()
        if not self._over:
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(json.dumps(code).encode() + b"\n")
            try:
                answer = await asyncio.wait_for(self._child.stdout.readline(), wall_s or self._limits.wall_s)
                exit_code, stdout, stderr = json.loads(answer)
            except TimeoutError:
                self._over = True
                self._child.kill()
            else:
                return Ran(exit_code, stdout, stderr, time.monotonic() - started)
        return Ran(None, "", "", time.monotonic() - started, StoppedBy.WALL)

    async def close(self) -> None:
        self.closed += 1
        self._over = True
        if self._child.returncode is None:
            self._child.kill()
            await self._child.wait()


class LocalCode:
    """Counts its runs and keeps its sessions, so that tests can look at both."""

    def __init__(self) -> None:
        self.runs: list[Sequence[str]] = []
        self.sessions: list[LocalSession] = []

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
        collect: Sequence[str] = (),
    ) -> Ran:
        self.runs.append(argv)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for name, content in (files or {}).items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            pipe = asyncio.subprocess.PIPE
            program = sys.executable if argv[0] == "python" else argv[0]
            child = await asyncio.create_subprocess_exec(
                program, *argv[1:], stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder
            )
            try:
                out, err = await asyncio.wait_for(child.communicate(stdin.encode()), (limits or Limits()).wall_s)
            except TimeoutError:
                child.kill()
                await child.wait()
                return Ran(None, "", "", time.monotonic() - started, StoppedBy.WALL)
            found = {name: Path(folder, name).read_bytes() for name in collect if Path(folder, name).is_file()}
        return Ran(child.returncode, out.decode(), err.decode(), time.monotonic() - started, files=found)

    async def open(self, limits: Limits | None = None) -> LocalSession:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", _CELLS, stdin=pipe, stdout=pipe)
        self.sessions.append(LocalSession(child, limits or Limits()))
        return self.sessions[-1]
