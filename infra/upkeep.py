"""Upkeep of an installation: takes back what ran out, says what was interrupted, removes what nothing refers to.

Safe beside live runs. Keys are listed before the ledger is read, and only what is older than the grace period goes, so
that what is on its way to the ledger stays. Nothing that a row refers to is ever removed. `dry_run` changes nothing.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from infra.ledger import Ledger, RunRecord, RunStatus
from infra.ledger.upkeep import (
    expire_leases,
    forget_superseded_checkpoints,
    interrupt,
    remove_superseded_policies,
    silence_s,
)
from infra.manifest import delete_folder
from infra.objects import ObjectStore, StoredObject
from infra.settings import Settings
from infra.verify.snapshot import read_snapshot
from infra.verify.stored import orphans

GRACE_S = 3600.0
"""Default of how old must be what is removed."""

LEAST_SILENCE_S = 120.0
"""A process that has been silent for less may only be slow; heartbeats come every 5 s."""

LEAST_GRACE_S = 600.0
"""What may be in the making keeps this long: an object of a live run whose ledger is away, a download, a draft."""

FILES = ("trajectories", "parts", "updates")
FOLDERS = ("policies", "checkpoints")
"""Rooms of a run in the object store; nothing else is touched."""


@dataclass(frozen=True)
class Action:
    """One thing that upkeep did, or would do."""

    kind: str
    """`lease`, `run`, `policy`, `checkpoint`, `orphan`, `scratch`, `cache` or `flow run`."""
    subject: str
    bytes: int
    reason: str


class Upkeep:
    """One round of upkeep over every run of a ledger; each verb returns what it did."""

    def __init__(
        self,
        ledger: Ledger,
        objects: ObjectStore,
        settings: Settings,
        *,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
    ) -> None:
        """Only what is older than ``grace_s`` goes; with ``dry_run`` nothing changes.

        Raises:
            ValueError: a negative grace period.
        """
        if grace_s < 0:
            raise ValueError(f"the grace period must be at least 0 s: got {grace_s:g}")
        self.ledger = ledger
        self.objects = objects
        self.settings = settings
        self.grace_s = grace_s
        self.dry_run = dry_run
        self._silence_s = max(grace_s, LEAST_SILENCE_S)

    def expire_leases(self) -> list[Action]:
        """Take back the leases that ran out, in every run."""
        return [
            Action("lease", f"{run.run_id} request {one.number}", 0, f"of {one.worker}, ran out {_ago(one.silent_s)}")
            for run in self._runs
            for one in expire_leases(self.ledger, run.run_id, alive=self._lives(run), dry_run=self.dry_run)
        ]

    def mark_interrupted(self) -> list[Action]:
        """Say of runs that call themselves running, and whose processes are all silent, that they were interrupted."""
        done: list[Action] = []
        for run in self._runs:
            if run.status is not RunStatus.RUNNING or self._lives(run):
                continue
            reason = f"the last sign of its processes came {_ago(silence_s(self.ledger, run.run_id))}"
            message = f"interrupted: {reason}. Continue with: sao train --resume {run.run_id}"
            if self.dry_run or interrupt(self.ledger, run.run_id, self._silence_s, message):
                done.append(Action("run", run.run_id, 0, f"{reason}; sao train --resume {run.run_id}"))
        return done

    def remove_superseded(self) -> list[Action]:
        """Remove the files of policies and checkpoints that a rewind undid and nothing needs."""
        done: list[Action] = []
        for run in self._runs:
            policies = remove_superseded_policies(
                self.ledger, run.run_id, self.grace_s, self._silence_s, dry_run=self.dry_run
            )
            done += [
                self._remove_folder("policy", policy.object_key, f"undone by a rewind to before step {policy.step}")
                for policy in policies
            ]
            if self._lives(run):
                continue
            checkpoints = forget_superseded_checkpoints(self.ledger, run.run_id, self.grace_s, dry_run=self.dry_run)
            done += [
                self._remove_folder("checkpoint", record.object_key, f"undone by a rewind to before step {record.step}")
                for record in checkpoints
            ]
        return done

    def remove_orphans(self) -> list[Action]:
        """Remove objects of known runs to which nothing in the ledger refers."""
        done: list[Action] = []
        for run in self._runs:
            listed = self.objects.listing(f"runs/{run.run_id}")
            snapshot = read_snapshot(self.ledger, run.run_id)
            grace_s = max(self.grace_s, LEAST_GRACE_S) if self._lives(run) else self.grace_s
            stray = set(orphans(snapshot, [found.key for found in listed]))
            for key, found in _units(run.run_id, (found for found in listed if found.key in stray)):
                age_s = time.time() - max(one.modified_at for one in found)
                if age_s > grace_s:
                    done.append(self._remove_orphan(key, found, f"nothing refers to it; written {_ago(age_s)}"))
        return done

    def remove_local(self) -> list[Action]:
        """Remove scratch folders and downloads on this machine that belong to no run that is alive."""
        alive = {run.run_id for run in self._runs if self._lives(run)}
        needed = {policy.sha256 for run_id in alive for policy in self.ledger.policies(run_id)}
        needed |= {checkpoint.sha256 for run_id in alive for checkpoint in self.ledger.checkpoints(run_id)}
        done = [
            self._remove_local("scratch", folder, "its run is not alive")
            for folder in _folders(self.settings.scratch)
            if folder.name not in alive and self._is_old(folder)
        ]
        for cache in (self.settings.cache / "policies", self.settings.cache / "checkpoints"):
            done += [
                self._remove_local("cache", folder, "a download that no run that is alive needs")
                for folder in _folders(cache)
                if folder.name not in needed and self._is_old(folder)
            ]
        return done

    def everything(self) -> list[Action]:
        """All verbs in order."""
        return [
            *self.expire_leases(),
            *self.mark_interrupted(),
            *self.remove_superseded(),
            *self.remove_orphans(),
            *self.remove_local(),
        ]

    @cached_property
    def _runs(self) -> list[RunRecord]:
        return self.ledger.runs()

    def _lives(self, run: RunRecord) -> bool:
        """Whether a run may have processes: it runs, and one of them was heard of."""
        now = self.ledger.run(run.run_id)
        return now.status is RunStatus.RUNNING and silence_s(self.ledger, run.run_id) <= self._silence_s

    def _is_old(self, folder: Path) -> bool:
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except FileNotFoundError:  # somebody is at work there
            return False
        return time.time() - newest > max(self.grace_s, LEAST_GRACE_S)

    def _remove_folder(self, kind: str, key: str, reason: str) -> Action:
        size = sum(found.size for found in self.objects.listing(key))
        if not self.dry_run:
            delete_folder(self.objects, key)
        return Action(kind, key, size, reason)

    def _remove_orphan(self, key: str, found: list[StoredObject], reason: str) -> Action:
        if not self.dry_run:
            if found[0].key == key:
                self.objects.delete(key)
            else:
                delete_folder(self.objects, key)
        return Action("orphan", key, sum(one.size for one in found), reason)

    def _remove_local(self, kind: str, folder: Path, reason: str) -> Action:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not self.dry_run:
            shutil.rmtree(folder)
        return Action(kind, str(folder), size, reason)


def _units(run_id: str, stray: Iterable[StoredObject]) -> Iterator[tuple[str, list[StoredObject]]]:
    """What goes together: the files of a policy or checkpoint that has no row, every other object by itself."""
    units: dict[str, list[StoredObject]] = defaultdict(list)
    for found in stray:
        room, *rest = PurePosixPath(found.key).relative_to(f"runs/{run_id}").parts
        whole = room in FOLDERS and len(rest) > 1 and not found.is_temporary
        if room in (*FILES, *FOLDERS):
            units[f"runs/{run_id}/{room}/{rest[0]}" if whole else found.key].append(found)
    yield from units.items()


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _ago(seconds: float) -> str:
    """An age for people."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
