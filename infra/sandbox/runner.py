"""The code runner that infra lends to environments: boxes from a small pool, a bound on what runs at once.

    pool: boxes whose Python is up and waits ── one taken per program or session, replaced soon after, never used twice

Nothing is started before the first use. Must be used from one event loop at a time, which it does not block.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from infra.sandbox.box import Box
from infra.sandbox.isolation import Isolation, Kind, NoIsolation, no_isolation, ways
from infra.sandbox.session import Session
from sao_core.outside import CodeSession, Limits, Ran, StoppedBy

logger = logging.getLogger(__name__)

POOL = 4
"""Boxes kept waiting: about 10 MB each."""
FILL_AFTER_S = 0.1
"""A box that was taken is replaced so much later, to leave the processor to the program that it was taken for."""
PROBE_S = 20.0
_PROBE = "import glob, subprocess, sys; subprocess.run([sys.executable, '-c', 'print(6 * 7)'], check=True)"
"""Loads modules and starts another interpreter, so that it fails where those cannot be read."""

_found: dict[Kind, Isolation] = {}
"""What worked in this process, by what was asked for."""


class Sandbox:
    """A :class:`sao_core.outside.CodeRunner`."""

    def __init__(self, kind: Kind | str = Kind.AUTO, *, programs: int | None = None, pool: int = POOL) -> None:
        """``programs`` at a time (default: two per core); the rest wait. ``pool`` boxes are kept waiting."""
        self._kind = Kind(kind)
        self._programs = programs or 2 * len(os.sched_getaffinity(0))
        self._pool = min(pool, self._programs)
        self._waiting: deque[Box] = deque()
        self._busy: set[Box] = set()
        self._sessions: set[Session] = set()
        self._isolation: Isolation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns: asyncio.Semaphore
        self._finding: asyncio.Lock
        self._closed = False

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
        collect: Sequence[str] = (),
    ) -> Ran:
        """As :meth:`CodeRunner.run` says. Raises :class:`NoIsolation` where no sandbox works."""
        if not argv:
            raise ValueError("argv must name a program: got nothing")
        limits = limits or Limits()
        for name in (*(files or {}), *collect):
            _check_inside(name)
        as_bytes = {
            name: data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
            for name, data in (files or {}).items()
        }
        if (size := sum(map(len, as_bytes.values()))) > limits.file_bytes:
            raise ValueError(f"files of {size} bytes do not fit into limits.file_bytes={limits.file_bytes}")
        await self._ready()
        async with self._turns:
            box = self._take()
            try:
                began = time.monotonic()
                await box.begin(argv, limits, as_bytes, stdin.encode(errors="surrogateescape"), collect)
                timer = asyncio.get_running_loop().call_later(limits.wall_s, box.stop, StoppedBy.WALL)
                try:
                    ending = await box.ended
                finally:
                    timer.cancel()
                passed = ending.wall_s if ending.wall_s is not None else time.monotonic() - began
                stdout, stderr = box.stdout.take(), box.stderr.take()
                over = box.stdout.full or box.stderr.full  # also by what the pipes still held at the end
                stopped = ending.stopped_by or (StoppedBy.OUTPUT if over else None)
                exit_code = None if stopped else ending.exit_code
                return Ran(exit_code, stdout, stderr or ending.trouble, passed, stopped, ending.files)
            finally:
                await self._end(box)

    async def open(self, limits: Limits | None = None) -> CodeSession:
        """As :meth:`CodeRunner.open` says. Raises :class:`NoIsolation` where no sandbox works."""
        limits = limits or Limits()
        await self._ready()
        box = self._take()
        try:
            await box.begin(None, limits)
        except asyncio.CancelledError:
            box.kill()
            raise
        finally:
            self._busy.discard(box)
        session = Session(box, limits, self._turns, self._sessions.discard)
        self._sessions.add(session)
        return session

    async def isolation(self) -> Isolation:
        """How code is isolated here, found out by making boxes. Raises :class:`NoIsolation`."""
        await self._ready()
        assert self._isolation is not None
        return self._isolation

    def close(self) -> None:
        """Kill every box; from any thread once the event loop is done, or from within it."""
        self._closed = True
        for session in list(self._sessions):
            session.kill()
        for box in (*self._waiting, *self._busy):
            box.kill()
        self._waiting.clear()
        self._busy.clear()

    async def _ready(self) -> None:
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._turns, self._finding = loop, asyncio.Semaphore(self._programs), asyncio.Lock()
        if self._isolation is None:
            async with self._finding:
                if self._isolation is None:
                    self._isolation = await _find(self._kind)
                    self._fill()
        if not self._isolation.isolated:
            logger.warning("SAO_SANDBOX=none: code that a model wrote starts unisolated, as this user")

    def _take(self) -> Box:
        assert self._isolation is not None
        while self._waiting and not self._waiting[0].alive:  # whatever killed it need not harm this program
            self._waiting.popleft().kill()
        box = self._waiting.popleft() if self._waiting else Box(self._isolation)
        self._busy.add(box)
        asyncio.get_running_loop().call_later(FILL_AFTER_S, self._fill)
        return box

    def _fill(self) -> None:
        """Start what the pool lacks: one box now, the others in later rounds of the loop, which stays responsive."""
        if self._closed or self._isolation is None or len(self._waiting) >= self._pool:
            return
        self._waiting.append(Box(self._isolation))
        asyncio.get_running_loop().call_soon(self._fill)

    async def _end(self, box: Box) -> None:
        try:
            await box.close()
        finally:
            self._busy.discard(box)


async def _find(kind: Kind) -> Isolation:
    if kind not in _found:
        troubles: list[tuple[Isolation, str]] = []
        for way in ways(kind):
            trouble = await _try(way)
            if trouble is None:
                _found[kind] = way
                logger.info("sandbox: %s", way.title)
                break
            troubles.append((way, trouble))
        else:
            raise no_isolation(kind, troubles)
    return _found[kind]


async def _try(way: Isolation) -> str | None:
    """Run a little program in a box made this way; what went wrong, or None."""
    box = Box(way)
    limits = Limits(wall_s=PROBE_S)
    try:
        async with asyncio.timeout(PROBE_S):
            await box.begin(["python", "-c", _PROBE], limits)
            ending = await box.ended
            said = box.stdout.take()
            if ending.exit_code == 0 and said == "42\n":
                return None
            return ending.trouble or box.stderr.take() or f"a program that prints 42 gave {ending.exit_code}, {said!r}"
    except TimeoutError:
        return f"no answer after {PROBE_S:g} s: {box.trouble()}"
    finally:
        await box.close()


def _check_inside(name: str) -> None:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or name != str(path):
        raise ValueError(f"a file must be a relative path inside the folder, such as src/main.py: got {name!r}")


__all__ = ["Kind", "NoIsolation", "Sandbox"]
