"""Brings files back from a program's folder: regular ones, no larger than allowed, through no symbolic link.

The program is dead by then, so nothing changes under its hands.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack


def regular_files(folder: int, names: Sequence[str], most_bytes: int) -> dict[str, bytes]:
    """Those of ``names`` below the open ``folder`` that exist, are regular, and fit together into ``most_bytes``."""
    found: dict[str, bytes] = {}
    for name in names:
        data = _read(folder, name.split("/"), most_bytes - sum(map(len, found.values())))
        if data is not None:
            found[name] = data
    return found


def _read(folder: int, parts: Sequence[str], most_bytes: int) -> bytes | None:
    with ExitStack() as opened:
        at = folder
        try:
            for part in parts[:-1]:
                at = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                opened.callback(os.close, at)
            # Without O_NONBLOCK a FIFO would wait for a writer.
            file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        except OSError:
            return None
        opened.callback(os.close, file)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            return None
        with open(file, "rb", closefd=False) as stream:
            return stream.read(found.st_size)
