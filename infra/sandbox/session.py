"""A session over one box: sends pieces of code, waits for each within its time, gathers what was printed.

Answers may be forged by the code itself; that touches nothing but what this session is told.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable

from infra.sandbox.box import Box, Ending
from infra.sandbox.inside import wire
from sao_core.outside import Limits, Ran, StoppedBy

_ANSWER_BYTES = 4096
"""Longest answer that is read; an honest one has forty bytes."""


class Session:
    """A :class:`sao_core.outside.CodeSession`. Calls of :meth:`run` that overlap wait for each other."""

    def __init__(
        self, box: Box, limits: Limits, programs: asyncio.Semaphore, forget: Callable[[Session], object]
    ) -> None:
        self._box, self._limits, self._programs, self._forget = box, limits, programs, forget
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()
        self._over: Ran | None = None
        self._heard = bytearray()

    async def run(self, code: str, wall_s: float | None = None) -> Ran:
        """As :meth:`CodeSession.run` says."""
        async with self._turn:
            if self._over is not None:
                return self._over
            async with self._programs:
                try:
                    return await self._run(code, self._limits.wall_s if wall_s is None else wall_s)
                except asyncio.CancelledError:
                    self.kill()  # the piece under way cannot be taken back
                    raise

    async def close(self) -> None:
        """As :meth:`CodeSession.close` says."""
        self._finish(Ran(None, "", "the session was closed", 0.0))
        self._forget(self)
        await self._box.close()

    def kill(self) -> None:
        """End it now, also from outside an event loop."""
        self._finish(Ran(None, "", "the session was closed", 0.0))
        self._forget(self)
        self._box.kill()

    async def _run(self, code: str, wall_s: float) -> Ran:
        began = time.monotonic()
        await self._box.mark()
        answering = asyncio.ensure_future(self._answer(code))
        try:
            await asyncio.wait((answering, self._box.ended), timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
            exit_code = answering.result() if answering.done() else None
            if not self._box.ended.done() and not answering.done():
                self._box.stop(StoppedBy.WALL)
        finally:
            answering.cancel()
        stdout, stderr = self._box.stdout.take(), self._box.stderr.take()
        passed = time.monotonic() - began
        if exit_code is not None and not self._box.ended.done():
            return Ran(exit_code, stdout, stderr, passed)
        ending = self._box.ended.result() if self._box.ended.done() else Ending()
        self._finish(Ran(None, "", _why(ending), 0.0, ending.stopped_by))
        await self.close()
        return Ran(None, stdout, stderr or ending.trouble, passed, ending.stopped_by)

    async def _answer(self, code: str) -> int | None:
        """The exit code that the session says; None if it said nothing that makes sense, or is gone."""
        loop = asyncio.get_running_loop()
        number = next(self._ids)
        try:
            await loop.sock_sendall(self._box.cells, wire.encode({"id": number}, [code.encode(errors="replace")]))
            while True:
                line, found, rest = self._heard.partition(b"\n")
                if found:
                    self._heard = rest
                    answer = json.loads(line)
                    if answer["id"] == number:
                        return int(bool(answer["code"]))
                elif len(self._heard) > _ANSWER_BYTES or not (data := await loop.sock_recv(self._box.cells, 1024)):
                    break
                else:
                    self._heard += data
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        # Gone, or forged: either way nothing more is to be had from it. Its end is on its way if it has died.
        await asyncio.wait((self._box.ended,), timeout=0.5)
        return None

    def _finish(self, ran: Ran) -> None:
        if self._over is None:
            self._over = ran


def _why(ending: Ending) -> str:
    if ending.stopped_by is StoppedBy.SANDBOX:
        return f"the session is over: its sandbox broke: {ending.trouble}"
    reason = f"its {ending.stopped_by} limit was reached" if ending.stopped_by else "its process has ended"
    return f"the session is over: {reason}"
