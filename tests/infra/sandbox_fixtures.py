"""A sandbox of each kind that is installed here, used from plain test functions."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infra.sandbox.isolation import Kind
from infra.sandbox.runner import Sandbox
from sao_core.outside import Limits, Ran

T = TypeVar("T")

KINDS = [kind for kind in (Kind.BUBBLEWRAP, Kind.NAMESPACES) if kind is not Kind.BUBBLEWRAP or shutil.which("bwrap")]
"""Namespaces are always among them: where neither works, the tests fail and say why."""

MIB = 2**20
QUICK = Limits(wall_s=8.0, cpu_s=4.0, memory_bytes=128 * MIB, processes=16, file_bytes=4 * MIB)


@dataclass
class Here:
    """One sandbox and the event loop that it is used from."""

    sandbox: Sandbox
    loop: asyncio.Runner

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(coroutine)

    def python(self, code: str, limits: Limits = QUICK, **more: Any) -> Ran:
        files = {"main.py": code, **more.pop("files", {})}
        return self.wait(self.sandbox.run(["python", "main.py"], files=files, limits=limits, **more))

    def cells(self, *codes: str, limits: Limits = QUICK, wall_s: float | None = None) -> list[Ran]:
        async def all_of_them() -> list[Ran]:
            session = await self.sandbox.open(limits)
            try:
                return [await session.run(code, wall_s) for code in codes]
            finally:
                await session.close()

        return self.wait(all_of_them())

    def together(self, programs: Sequence[str], limits: Limits = QUICK) -> list[Ran]:
        async def gathered() -> list[Ran]:
            return await asyncio.gather(*(self.sandbox.run(["python", "-c", code], limits=limits) for code in programs))

        return self.wait(gathered())


@contextmanager
def opened(kind: Kind) -> Iterator[Here]:
    """A sandbox of this kind until the end of the block."""
    with asyncio.Runner() as loop:
        sandbox = Sandbox(kind)
        try:
            yield Here(sandbox, loop)
        finally:
            sandbox.close()


def processes_with(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line:
                found.append(int(name))
    return found


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 3
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes_with(mark)
