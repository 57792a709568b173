"""The disk of a rig's object store fills up once: really, where it is a small disk of its own, or by writes that fail.

Whoever finds it full ends with one error; the supervisor then stops everybody, makes room and resumes the run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from rig_plan import Plan

from infra.objects import PARTIAL, ObjectStore

RECORDS = 8
"""Rollouts that are recorded before the disk is filled, and again before the end."""
CHUNK = 64 * 1024


class Disk:
    """Fills, and makes room again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ballast = Path(plan.object_store) / "ballast"
        self._enough = RECORDS
        self.full = False
        self.done = False

    def look(self) -> None:
        """Fill the disk, or call for calm, once enough was recorded."""
        recorded = sum(1 for _ in self._plan.said("recorded"))
        if self.full or recorded < self._enough:
            return
        if self.done:
            self._plan.calm.touch()
            return
        self.full = True
        _full_flag(self._plan).touch()
        if self._plan.disk_mb:
            self._fill()

    def make_room(self) -> list[str]:
        """Free the disk; returns the half-made files that were left on it."""
        left = [str(path) for path in Path(self._plan.object_store).rglob(f"*{PARTIAL}")]
        self._ballast.unlink(missing_ok=True)
        _full_flag(self._plan).unlink()
        self.full, self.done = False, True
        self._enough = sum(1 for _ in self._plan.said("recorded")) + RECORDS
        return left

    def _fill(self) -> None:
        descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(descriptor, bytes(CHUNK))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(descriptor)


def let_writes_fail(plan: Plan) -> None:
    """Have this process write half a file, then find no space left, while the disk of the rig is said to be full."""
    into_place = ObjectStore._into_place

    def failing(store: ObjectStore, key: str, bring: Callable[[Path], object], *, durable: bool) -> None:
        def half(temporary: Path) -> None:
            temporary.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        into_place(store, key, half if _full_flag(plan).exists() else bring, durable=durable)

    ObjectStore._into_place = failing  # type: ignore[method-assign]


def _full_flag(plan: Plan) -> Path:
    return plan.path("full")
