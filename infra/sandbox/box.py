"""One box as the worker sees it: a process to start, four descriptors to read within bounds, something to kill.

Used for one job. Nothing that comes out is believed beyond its form; a box that breaks is told as data.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from infra.sandbox.inside import wire
from infra.sandbox.isolation import Isolation
from sao_core.outside import Limits, StoppedBy

START_S = 30.0
"""Longest that a box may take to start a program; a machine this slow is broken."""
_GRACE_S = 1.0
"""Given to a box to end by itself before its outer process is killed, which ends it too."""
_CHUNK = 1 << 16
_USERS = range(20_000, 60_000)
"""Numbers for the users of boxes: mapped in every container, and hardly anybody's."""

_numbers = itertools.count(os.getpid() * 64)


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    exit_code: int | None = None
    stopped_by: StoppedBy | None = None
    wall_s: float | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    trouble: str = ""
    """What the box itself complained of, if it broke."""


class Stream:
    """One output of a program, read up to a bound."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.full = False
        """There was more than the limit; the rest is lost."""
        self._data = bytearray()
        self._limit = 0
        self._full: Callable[[], object] = bool
        self._loop: asyncio.AbstractEventLoop | None = None
        os.set_blocking(descriptor, False)

    def watch(self, limit: int, full: Callable[[], object]) -> None:
        """Read from now on; ``full`` is called once there is more than ``limit`` between two :meth:`take`."""
        self._limit, self._full = limit, full
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.descriptor, self._read)

    def take(self) -> str:
        """What came since the last call, all that was written before it included, as text of at most the limit."""
        while self._loop is not None and self._read():
            pass
        text = bytes(self._data[: self._limit]).decode(errors="replace")
        self._data.clear()
        return text

    def close(self) -> None:
        """Read no more."""
        self._unwatch()
        os.close(self.descriptor)

    def _read(self) -> bool:
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        self._data += data
        if not data or len(self._data) > self._limit:
            self._unwatch()
            if data:
                self.full = True
                self._full()
            return False
        return True

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.descriptor)
        self._loop = None


class Box:
    """Started at once; :meth:`begin` gives it its job, :meth:`close` ends all that is in it."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self.control, control = socket.socketpair()
        self.cells, cells = socket.socketpair()
        (out, out_end), (err, err_end), (self._trouble, trouble_end) = os.pipe(), os.pipe(), os.pipe()
        os.set_blocking(self._trouble, False)
        self.stdout, self.stderr = Stream(out), Stream(err)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: wire.Reader
        self.ended: asyncio.Future[Ending]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = isolation.start(control.fileno(), cells.fileno(), out_end, err_end, trouble_end)
        except OSError as error:
            os.write(trouble_end, str(error).encode()[:1000])
        finally:
            for descriptor in (out_end, err_end, trouble_end):
                os.close(descriptor)
            control.close()
            cells.close()
        self.control.setblocking(False)
        self.cells.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether its outer process runs."""
        return self._process is not None and self._process.poll() is None

    async def begin(
        self,
        argv: Sequence[str] | None,
        limits: Limits,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        collect: Sequence[str] = (),
    ) -> None:
        """Start ``argv``, or a session without one; returns once it runs or :attr:`ended` says why not."""
        loop = self._loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._started = loop.create_future()
        self._reader = wire.Reader(limits.file_bytes + wire.HEADER_BYTES)
        files = files or {}
        job: dict[str, Any] = {
            "argv": None if argv is None else list(argv),
            "files": list(files),
            "collect": list(collect),
            "limits": asdict(limits),
            "uid": _USERS[next(_numbers) % len(_USERS)],
            "limit_processes": self._isolation.limits_processes,
        }
        for stream in (self.stdout, self.stderr):
            stream.watch(limits.output_bytes, lambda: self.stop(StoppedBy.OUTPUT))
        loop.add_reader(self.control, self._hear)
        try:
            async with asyncio.timeout(START_S):
                await loop.sock_sendall(self.control, wire.encode(job, [*files.values(), stdin]))
                await asyncio.wait((self._started, self.ended), return_when=asyncio.FIRST_COMPLETED)
        except (TimeoutError, OSError) as error:
            self._lost(str(error) or f"no program after {START_S:g} s")

    async def mark(self) -> None:
        """The processor time used so far counts no more."""
        with suppress(OSError):  # dead: `ended` says so
            await asyncio.get_running_loop().sock_sendall(self.control, wire.encode({"event": "mark"}))

    def stop(self, by: StoppedBy) -> None:
        """The job is over because of a limit."""
        self._end(Ending(stopped_by=by))

    async def close(self) -> None:
        """Return once every process in the box is dead; harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        try:
            if self._process is not None:
                await self._gone(self._process)
        finally:
            self._clear()

    def kill(self) -> None:
        """The same from outside an event loop, or in a hurry."""
        if not self._closed:
            self._closed = True
            self._let_go()
            self._clear()

    def trouble(self) -> str:
        """What the box wrote about its own failure."""
        with suppress(OSError):
            return os.read(self._trouble, 4096).decode(errors="replace").strip()
        return ""

    async def _gone(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, exited.set)
        try:
            async with asyncio.timeout(_GRACE_S):
                await exited.wait()
        except TimeoutError:
            process.kill()
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _let_go(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.control)
            if not self.ended.done():
                self.ended.set_result(Ending())
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # the box takes this as its end

    def _clear(self) -> None:
        if self._process is not None:
            if not self._isolation.isolated:  # nothing else ends its descendants and removes its folder
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
            self._process.kill()
            self._process.wait()
        self.stdout.close()
        self.stderr.close()
        self.control.close()
        self.cells.close()
        os.close(self._trouble)

    def _hear(self) -> None:
        try:
            data = self.control.recv(_CHUNK)
            if not data:
                self._lost("")
            for header, blobs in self._reader.feed(data):
                self._take(header, blobs)
        except (OSError, wire.Garbage) as error:
            self._lost(str(error))

    def _take(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        if header.get("event") == "started" and not self._started.done():
            self._started.set_result(None)
        elif header.get("event") == "done":
            status = header["status"]
            self._end(
                Ending(
                    exit_code=status if status is not None and status >= 0 else None,
                    stopped_by=StoppedBy(header["stopped"]) if header["stopped"] else None,
                    wall_s=float(header["wall_s"]),
                    files=dict(zip(header["files"], blobs, strict=True)),
                )
            )

    def _lost(self, why: str) -> None:
        trouble = self.trouble() or why or "its first process has vanished"
        self._end(Ending(stopped_by=StoppedBy.SANDBOX, trouble=trouble))

    def _end(self, ending: Ending) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.control)
        if not self.ended.done():
            self.ended.set_result(ending)
