"""Trajectories in the ledger: recorded under a lease, claimed for a step, refused with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Row, select, update

from infra.ledger.database import Database, clock, writes, writes_durably
from infra.ledger.history import trajectory_row
from infra.ledger.records import (
    TRAINING,
    LedgerError,
    RequestState,
    TrajectoryRow,
    TrajectoryState,
)
from infra.ledger.transitions import (
    GivenUp,
    chunks,
    give_up,
    insert_all,
    lock_requests,
    reason_label,
    remove_parts,
    require_attempt,
)
from infra.models import Request, TrajectoryEntry, Update
from sao_core.trajectory import Outcome

NOT_TRAINED_ON = (Outcome.FAILED, Outcome.BLOCKED)


class TrajectoryLedger(Database):
    """What was generated, and what became of it."""

    @writes_durably
    def record(self, connection: Connection, run_id: str, worker: str, rows: Sequence[TrajectoryRow]) -> list[str]:
        """Record stored rollouts, each with all its segments; returns the ids that are recorded.

        A rollout is accepted while its attempt holds the request's lease, and its request is done then. One that was
        recorded before from the same object counts as recorded; any other one is left out. A failed or blocked one is
        recorded as rejected and its request reissued, or exhausted after ``max_attempts``. Parts of what is recorded
        are not needed any more: their rows go.
        """
        rollouts = _rollouts(rows)
        locked = lock_requests(connection, run_id, (number for number, _ in rollouts))
        known = _stored_at(connection, [row.trajectory_id for row in rows])
        now = connection.execute(select(clock())).scalar_one()
        recorded: list[str] = []
        new: list[dict[str, Any]] = []
        done: list[int] = []
        failed: list[GivenUp] = []
        for (number, attempt), segments in rollouts.items():
            ids = [row.trajectory_id for row in segments]
            if all(known.get(row.trajectory_id) == (row.object_key, row.object_row, row.sha256) for row in segments):
                recorded += ids
                continue
            request = locked.get(number)
            if request is None or not _holds(request, worker, attempt):
                continue
            recorded += ids
            new += [_values(row, request, now) for row in segments]
            if segments[0].outcome in NOT_TRAINED_ON:
                failed.append(GivenUp(number, attempt, worker, segments[0].stop_reason or segments[0].outcome))
            else:
                done.append(number)
        insert_all(connection, TrajectoryEntry, new)
        remove_parts(connection, run_id, [*done, *(given_up.number for given_up in failed)])
        for chunk in chunks(done):
            connection.execute(
                update(Request)
                .where(Request.run_id == run_id, Request.number.in_(chunk))
                .values(state=RequestState.DONE, lease_worker=None, lease_until=None)
            )
        give_up(connection, run_id, failed)
        return recorded

    @writes
    def claim(
        self, connection: Connection, run_id: str, step: int, batch_size: int, *, attempt: int | None = None
    ) -> list[TrajectoryRow]:
        """Claim the ``batch_size`` rollouts that have been ready longest, whole groups only; [] if there are too few.

        The same ones are returned if asked again. Rows come by request number and segment, so that a batch does not
        depend on the order in which its rollouts ended.

        Raises:
            Fenced: the caller is of an earlier attempt of the run.
            LedgerError: the step is committed already.
        """
        require_attempt(connection, run_id, attempt)
        committed = select(Update.update_id).where(Update.run_id == run_id, Update.step == step, ~Update.superseded)
        if connection.execute(committed).first():
            raise LedgerError(f"step {step} of run {run_id} is committed already: nothing can be claimed for it")
        missing = batch_size - len({row.request_number for row in claimed_rows(connection, run_id, step)})
        if missing > 0:
            numbers = _oldest_ready(connection, run_id, missing)
            if len(numbers) < missing:
                return []
            for chunk in chunks(numbers):
                connection.execute(
                    update(TrajectoryEntry)
                    .where(
                        TrajectoryEntry.run_id == run_id,
                        TrajectoryEntry.state == TrajectoryState.READY,
                        TrajectoryEntry.request_number.in_(chunk),
                    )
                    .values(state=TrajectoryState.CLAIMED, claimed_step=step)
                )
        return [trajectory_row(row) for row in claimed_rows(connection, run_id, step)]

    @writes
    def reject_claimed(
        self,
        connection: Connection,
        run_id: str,
        step: int,
        reasons: Mapping[str, str],
        *,
        attempt: int | None = None,
    ) -> None:
        """Reject claimed rollouts before their step (a corrupted object, say) by trajectory id → reason.

        Their requests are reissued or exhausted. Other members of their groups are ready again, or go with the group.
        """
        require_attempt(connection, run_id, attempt)
        claimed = claimed_rows(connection, run_id, step)
        why = {row.request_number: reasons[row.trajectory_id] for row in claimed if row.trajectory_id in reasons}
        lock_requests(connection, run_id, why)
        groups = {row.group_number for row in claimed if row.request_number in why} - {None}
        for chunk in chunks(sorted(groups)):
            connection.execute(
                update(TrajectoryEntry)
                .where(
                    TrajectoryEntry.run_id == run_id,
                    TrajectoryEntry.state == TrajectoryState.CLAIMED,
                    TrajectoryEntry.group_number.in_(chunk),
                    TrajectoryEntry.request_number.not_in(why),
                )
                .values(state=TrajectoryState.READY, claimed_step=None)
            )
        attempts = {row.request_number: row.attempt for row in claimed}
        reject(connection, run_id, step, why)
        give_up(connection, run_id, [GivenUp(n, attempts[n], None, reason) for n, reason in sorted(why.items())])


def reject(connection: Connection, run_id: str, step: int, why: Mapping[int, str]) -> None:
    """Move claimed rollouts of a step to rejected, by request number → reason."""
    for reason, numbers in groupby(sorted(why, key=lambda n: (why[n], n)), key=lambda n: why[n]):
        for chunk in chunks(numbers):
            connection.execute(
                update(TrajectoryEntry)
                .where(
                    TrajectoryEntry.run_id == run_id,
                    TrajectoryEntry.state == TrajectoryState.CLAIMED,
                    TrajectoryEntry.claimed_step == step,
                    TrajectoryEntry.request_number.in_(chunk),
                )
                .values(state=TrajectoryState.REJECTED, reject_reason=reason)
            )


def _rollouts(rows: Sequence[TrajectoryRow]) -> dict[tuple[int, int], list[TrajectoryRow]]:
    rollouts: dict[tuple[int, int], list[TrajectoryRow]] = {}
    for row in sorted(rows, key=lambda row: (row.request_number, row.attempt, row.segment)):
        rollouts.setdefault((row.request_number, row.attempt), []).append(row)
    for (number, attempt), segments in rollouts.items():
        if [row.segment for row in segments] != list(range(segments[0].num_segments)):
            raise LedgerError(
                f"request {number}, attempt {attempt}: all {segments[0].num_segments} segments are recorded at once: "
                f"got {[row.segment for row in segments]}"
            )
    return rollouts


def _stored_at(connection: Connection, ids: Sequence[str]) -> dict[str, tuple[str, int, str]]:
    columns = (
        TrajectoryEntry.trajectory_id,
        TrajectoryEntry.object_key,
        TrajectoryEntry.object_row,
        TrajectoryEntry.sha256,
    )
    known: dict[str, tuple[str, int, str]] = {}
    for chunk in chunks(ids):
        found = connection.execute(select(*columns).where(TrajectoryEntry.trajectory_id.in_(chunk)))
        known.update({name: (key, row, sha256) for name, key, row, sha256 in found})
    return known


def _holds(request: Row[Any], worker: str, attempt: int) -> bool:
    return (
        request.state == RequestState.LEASED
        and request.lease_worker == worker
        and request.attempts == attempt
        and bool(request.lease_holds)
    )


def _values(row: TrajectoryRow, request: Row[Any], now: float) -> dict[str, Any]:
    state, reason = TrajectoryState.READY, None
    if row.outcome in NOT_TRAINED_ON:
        state, reason = TrajectoryState.REJECTED, reason_label(row.stop_reason or row.outcome)
    elif request.purpose not in TRAINING:
        state = TrajectoryState.KEPT
    return {
        "trajectory_id": row.trajectory_id,
        "run_id": request.run_id,
        "request_number": row.request_number,
        "attempt": row.attempt,
        "segment": row.segment,
        "num_segments": row.num_segments,
        "purpose": request.purpose,
        "prompt_key": request.prompt_key,
        "group_number": request.group_number,
        "group_size": request.group_size,
        "difficulty": row.difficulty,
        "state": state,
        "reject_reason": reason,
        "rewound": 0,
        "object_key": row.object_key,
        "object_row": row.object_row,
        "sha256": row.sha256,
        "num_tokens": row.num_tokens,
        "num_action_tokens": row.num_action_tokens,
        "num_turns": row.num_turns,
        "score": row.score,
        "outcome": row.outcome,
        "stop_reason": row.stop_reason,
        "greedy": row.greedy,
        "version_min": row.version_min,
        "version_max": row.version_max,
        "recorded_at": now,
        "duration_s": row.duration_s,
        "environment_version": row.environment_version,
    }


def claimed_rows(connection: Connection, run_id: str, step: int) -> Sequence[Row[Any]]:
    """Rows claimed for a step, by request number and segment, inside a transaction."""
    claimed = select(TrajectoryEntry.__table__).where(
        TrajectoryEntry.run_id == run_id,
        TrajectoryEntry.state == TrajectoryState.CLAIMED,
        TrajectoryEntry.claimed_step == step,
    )
    # Sorted here, as below: for an ORDER BY, SQLite would go through the whole run in that order.
    return sorted(connection.execute(claimed), key=lambda row: (row.request_number, row.segment))


def _oldest_ready(connection: Connection, run_id: str, wanted: int) -> list[int]:
    """Request numbers of ``wanted`` ready rollouts, whole groups, in the order in which they were complete."""
    columns = (TrajectoryEntry.recorded_at, TrajectoryEntry.request_number)
    ready = select(*columns, TrajectoryEntry.group_number, TrajectoryEntry.group_size).where(
        TrajectoryEntry.run_id == run_id,
        TrajectoryEntry.state == TrajectoryState.READY,
        TrajectoryEntry.purpose.in_(TRAINING),
        TrajectoryEntry.segment == 0,
    )
    chosen: list[int] = []
    groups: dict[int, list[int]] = {}
    seen: Counter[int] = Counter()
    for _, number, group, size in sorted(connection.execute(ready).tuples(), key=lambda row: row[:2]):
        if group is None:
            unit = [number]
        else:
            groups.setdefault(group, []).append(number)
            seen[group] += 1
            if seen[group] < size:
                continue
            unit = groups[group]
        if len(chosen) + len(unit) <= wanted:
            chosen += unit
        if len(chosen) == wanted:
            break
    return chosen
