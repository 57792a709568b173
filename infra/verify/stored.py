"""Whether the object store holds what the ledger says it holds, and what else lies there; memory stays flat.

A live run removes old policies and checkpoints meanwhile: what is found missing is looked up again before it is told.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import Connection, Row, select

from infra.ledger import Ledger, PartState, RequestState, RunStatus, TrajectoryRow
from infra.ledger.database import Mode
from infra.ledger.history import trajectory_row
from infra.ledger.transitions import chunks
from infra.manifest import CorruptFolder, fetch_folder
from infra.models import RolloutPart, TrajectoryEntry
from infra.objects import ObjectMissing, ObjectStore, is_temporary
from infra.trajectory_store import TrajectoryStore
from infra.update_records import update_key
from infra.verify.accounts import OPEN, Problem
from infra.verify.snapshot import Snapshot

ROWS_AT_ONCE = 256
"""Trajectories read together, unless one object has more."""

KNOWN_DAMAGE = "object damaged"
"""How the reason of a trajectory begins that was rejected because its object cannot be read."""

PART_STATES = frozenset(PartState)

ACCOUNTS_OF_THE_LEDGER = ("state", "reject_reason", "claimed_step", "trained_step", "rewound", "recorded_at")
"""What the ledger alone knows of a trajectory."""
LATER_COLUMNS = ("duration_s", "environment_version")
"""Empty in rows that an earlier version recorded."""


def weights(s: Snapshot, ledger: Ledger, objects: ObjectStore) -> Iterator[Problem]:
    """Every policy that was not removed and every surviving checkpoint is there whole, each file with its hash.

    A checkpoint is of a committed step, or of step 0. Folders of a remote store are downloaded to a temporary place,
    one at a time.
    """
    run_id, steps = s.run.run_id, {0, *(row.step for row in s.steps)}
    for row in s.checkpoints:
        if not row.superseded and row.step not in steps:
            yield f"checkpoint {row.step}", f"its step was not committed: the last one is {s.last_step}"
    for row in stored_policies(s):
        if (damage := _folder_damage(objects, row)) is not None and ledger.policy(
            run_id, row.version
        ).removed_at is None:
            yield f"policy {row.version}", damage
    for row in surviving_checkpoints(s):
        if (damage := _folder_damage(objects, row)) is not None:
            now = {(record.step, record.object_key) for record in ledger.checkpoints(run_id)}
            if (row.step, row.object_key) in now:
                yield f"checkpoint {row.step}", damage


def stored_policies(s: Snapshot) -> list[Row[Any]]:
    """Policies whose files must be there."""
    return [row for row in s.policies if row.removed_at is None]


def surviving_checkpoints(s: Snapshot) -> list[Row[Any]]:
    """Checkpoints whose files must be there."""
    return [row for row in s.checkpoints if not row.superseded]


def trajectory_objects(s: Snapshot, ledger: Ledger, objects: ObjectStore) -> Iterator[Problem]:
    """The object of every trajectory exists, can be decoded, and its row is what the ledger says, hash included.

    One that was rejected because its object is damaged is accounted for.
    """
    store = TrajectoryStore(objects)
    for ids in _whole_objects(checked_trajectories(s)):
        rows, unreadable = _trajectory_rows(ledger, ids)
        yield from unreadable
        rollouts, damaged = store.read_intact(rows)
        yield from sorted(damaged.items())
        stored = {segment.trajectory_id: segment for rollout in rollouts for segment in rollout}
        for row in rows:
            if row.trajectory_id in stored:
                found = TrajectoryRow.of(stored[row.trajectory_id], row.object_key, row.object_row, row.sha256)
                yield from ((row.trajectory_id, wrong) for wrong in _differences(row, found))


def checked_trajectories(s: Snapshot) -> list[Row[Any]]:
    """Trajectories whose object must be intact."""
    return [row for row in s.trajectories if not (row.reject_reason or "").startswith(KNOWN_DAMAGE)]


def parts(s: Snapshot, ledger: Ledger, objects: ObjectStore) -> Iterator[Problem]:
    """The pieces of unfinished rollouts are there, each with its hash, and can be gone on from while they are open.

    Open ones belong to a request that waits or is leased, count 0, 1, … and share its attempt; the last one of a
    waiting request can be restored from. The others are kept for analysis.
    """
    series: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in s.parts:
        if row.state not in PART_STATES:
            yield f"part {row.part_id}", f"its state `{row.state}` is unknown"
        if row.request_number not in s.requests:
            yield f"part {row.part_id}", f"its request {row.request_number} does not exist"
        elif row.state == PartState.OPEN:
            series[row.request_number].append(row)
        if (damage := _part_damage(objects, row)) is not None and _has_part(ledger, row.part_id):
            yield f"part {row.part_id}", damage
    for number, rows in series.items():
        rows.sort(key=lambda row: row.part)
        subject, request, numbers = f"request {number}", s.requests[number], [row.part for row in rows]
        if request.state not in OPEN or s.run.status == RunStatus.COMPLETED:
            yield subject, f"it has open parts, but is {request.state} in a {s.run.status} run"
        if numbers != list(range(len(numbers))):
            yield subject, f"its open parts are {numbers}: they count from 0"
        made = {row.attempt for row in rows}
        if len(made) > 1 or (request.state == RequestState.LEASED and made != {request.attempts}):
            yield subject, f"its open parts are of attempts {sorted(made)}, it is {request.state} at {request.attempts}"
        if request.state == RequestState.PENDING and not rows[-1].restorable:
            yield subject, "it waits with open parts from which nobody can go on"


def orphans(s: Snapshot, keys: Iterable[str]) -> list[str]:
    """Keys to which nothing in the ledger refers: what a killed process left behind, or a live one is writing.

    A temporary file beside the files of a policy is one of them.
    """
    files = {row.object_key for row in (*s.trajectories, *s.parts)}
    files |= {update_key(s.run.run_id, row.step) for row in s.updates}
    folders = {row.object_key for row in (*stored_policies(s), *s.checkpoints)}

    def referred(key: str) -> bool:
        within = any(str(folder) in folders for folder in PurePosixPath(key).parents)
        return key in files or (within and not is_temporary(key))

    return [key for key in keys if not referred(key)]


def _folder_damage(objects: ObjectStore, row: Row[Any]) -> str | None:
    with tempfile.TemporaryDirectory(prefix="sao-verify-") as scratch:
        try:
            fetch_folder(objects, row.object_key, row.sha256, Path(scratch))
        except CorruptFolder as error:
            return str(error)
    return None


def _part_damage(objects: ObjectStore, row: Row[Any]) -> str | None:
    try:
        found = hashlib.sha256(objects.get(row.object_key)).hexdigest()
    except ObjectMissing as error:
        return str(error)
    return (
        None if found == row.sha256 else f"{row.object_key} is damaged: its sha256 should be {row.sha256}: got {found}"
    )


def _has_part(ledger: Ledger, part_id: int) -> bool:
    statement = select(RolloutPart.part_id).where(RolloutPart.part_id == part_id)
    return ledger.transact(lambda connection: connection.execute(statement).first() is not None, Mode.READ)


def _whole_objects(trajectories: Sequence[Row[Any]]) -> Iterator[list[str]]:
    """Trajectory ids, cut into lists of at least `ROWS_AT_ONCE` so that each object is in one of them."""
    by_object: dict[str, list[str]] = defaultdict(list)
    for row in trajectories:
        by_object[row.object_key].append(row.trajectory_id)
    ids: list[str] = []
    for key in sorted(by_object):
        ids += by_object[key]
        if len(ids) >= ROWS_AT_ONCE:
            yield ids
            ids = []
    if ids:
        yield ids


def _trajectory_rows(ledger: Ledger, ids: Sequence[str]) -> tuple[list[TrajectoryRow], list[Problem]]:
    def read(connection: Connection) -> list[Row[Any]]:
        table = TrajectoryEntry.__table__
        found = (connection.execute(select(table).where(table.c.trajectory_id.in_(chunk))) for chunk in chunks(ids))
        return [row for rows in found for row in rows]

    rows: list[TrajectoryRow] = []
    unreadable: list[Problem] = []
    for row in ledger.transact(read, Mode.READ):
        try:
            rows.append(trajectory_row(row))
        except ValueError as error:
            unreadable.append((row.trajectory_id, f"its row cannot be read: {error}"))
    return rows, unreadable


def _differences(row: TrajectoryRow, found: TrajectoryRow) -> Iterator[str]:
    """Where the ledger describes a trajectory otherwise than its object."""
    same = replace(found, **{name: getattr(row, name) for name in ACCOUNTS_OF_THE_LEDGER})
    for name, value in vars(row).items():
        if value != getattr(same, name) and not (value is None and name in LATER_COLUMNS):
            where = f"{row.object_key} row {row.object_row}"
            yield f"the ledger says {name} {value!r}, {where} says {getattr(same, name)!r}"
