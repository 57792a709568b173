"""What the processes of a box use together: memory, processor time, number. Limits per process cannot say that.

Only reads /proc; decides nothing and kills nobody.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PARENT, _UTIME, _CSTIME, _THREADS, _RSS = 1, 11, 14, 17, 21
"""Places in /proc/PID/stat, counted from the state on."""


@dataclass(frozen=True)
class Usage:
    """Of all processes of the program, also of those that are gone where their parents waited for them."""

    resident: dict[int, int]
    """Bytes by process; pages that several share count for each of them, see :func:`proportional_bytes`."""
    threads: int
    cpu_s: float


def usage(only_descendants: bool) -> Usage:
    """Of every process but this one, or of this one's descendants where there is no process namespace."""
    me = os.getpid()
    stats: dict[int, list[str]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != me:
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                stats[int(name)] = file.read().rpartition(") ")[2].split()
    if only_descendants:
        stats = _descendants(me, stats)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = sum(int(value) for stat in stats.values() for value in stat[_UTIME : _CSTIME + 1])
    return Usage(
        {pid: int(stat[_RSS]) * _PAGE for pid, stat in stats.items()},
        sum(int(stat[_THREADS]) for stat in stats.values()),
        children.ru_utime + children.ru_stime + ticks / _TICKS,
    )


def proportional_bytes(resident: dict[int, int]) -> int:
    """Memory of these processes, pages that several share counted once in all; slow."""
    total = 0
    for pid, most in resident.items():
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except ProcessLookupError:
            continue
        except OSError:  # it hides, so it is not given the benefit
            total += most
    return total


def _descendants(ancestor: int, stats: dict[int, list[str]]) -> dict[int, list[str]]:
    found = {ancestor}
    growing = True
    while growing:
        more = {pid for pid, stat in stats.items() if int(stat[_PARENT]) in found} - found
        found |= more
        growing = bool(more)
    return {pid: stats[pid] for pid in found if pid in stats}
