"""What `sao doctor` says of the sandbox: the way that works here, and how long boxes take to start.

Starts a few boxes and closes them; leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from infra.sandbox.isolation import Kind
from infra.sandbox.runner import Sandbox

_TIMES = 5
_PAUSE_S = 0.3
"""Between two starts, so that the pool is full again, as it is in rollouts."""


def examine(kind: str) -> str:
    """One line. Raises :class:`infra.sandbox.isolation.NoIsolation` where nothing works."""
    return asyncio.run(_examine(Kind(kind)))


async def _examine(kind: Kind) -> str:
    sandbox = Sandbox(kind)
    try:
        way = await sandbox.isolation()
        took = []
        for _ in range(_TIMES):
            await asyncio.sleep(_PAUSE_S)
            began = time.perf_counter()
            await sandbox.run(["python", "-c", "pass"])
            took.append(time.perf_counter() - began)
        return f"{way.title}, a program takes {median(took) * 1000:.0f} ms to start and end"
    finally:
        sandbox.close()
