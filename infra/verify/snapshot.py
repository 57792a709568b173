"""What the ledger says of one run at one moment: a single reading transaction, small rows, no prompt texts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Row, select

from infra.ledger import Ledger, TrajectoryState, UnknownRun
from infra.ledger.database import Mode
from infra.models import (
    Checkpoint,
    ConfigChange,
    EvaluationOrder,
    FailedAttempt,
    Frontier,
    Policy,
    Request,
    RolloutPart,
    Run,
    TrajectoryEntry,
    Update,
)

COUNTING = frozenset(
    {TrajectoryState.READY, TrajectoryState.CLAIMED, TrajectoryState.TRAINED, TrajectoryState.KEPT},
)
"""States of a rollout that counts: it settles its request. The other state is `rejected`, which has a reason."""

MAX_ATTEMPTS = "rollout.max_attempts"

_REQUEST = (
    Request.number,
    Request.state,
    Request.attempts,
    Request.group_number,
    Request.group_size,
    Request.lease_worker,
    Request.lease_until,
)
_TRAJECTORY = (
    TrajectoryEntry.trajectory_id,
    TrajectoryEntry.request_number,
    TrajectoryEntry.attempt,
    TrajectoryEntry.segment,
    TrajectoryEntry.num_segments,
    TrajectoryEntry.purpose,
    TrajectoryEntry.group_number,
    TrajectoryEntry.state,
    TrajectoryEntry.reject_reason,
    TrajectoryEntry.claimed_step,
    TrajectoryEntry.trained_step,
    TrajectoryEntry.object_key,
)
_FAILED = (FailedAttempt.request_number, FailedAttempt.attempt)
_UPDATE = (
    Update.step,
    Update.version_before,
    Update.version_after,
    Update.num_trajectories,
    Update.metrics_json,
    Update.superseded,
)


@dataclass(frozen=True)
class Snapshot:
    """One run in the ledger; rows have the columns of `infra.models`."""

    run: Row[Any]
    requests: Mapping[int, Row[Any]]
    """By number."""
    trajectories: Sequence[Row[Any]]
    """By request number, attempt, segment."""
    failed: Sequence[Row[Any]]
    updates: Sequence[Row[Any]]
    """Superseded ones too, in the order in which they were committed."""
    policies: Sequence[Row[Any]]
    """By version."""
    checkpoints: Sequence[Row[Any]]
    """By step."""
    parts: Sequence[Row[Any]]
    unreported: Sequence[int]
    """Policy versions whose evaluation was asked for and not reported."""
    max_attempts: frozenset[int]
    """Every bound on attempts that was in force."""
    tasks_over: bool
    """Whether its tasks came to an end, so that there may be fewer updates than were asked for."""

    @cached_property
    def rollouts(self) -> Mapping[tuple[int, int], Sequence[Row[Any]]]:
        """(request number, attempt) → its segments in order."""
        rollouts: dict[tuple[int, int], list[Row[Any]]] = defaultdict(list)
        for row in self.trajectories:
            rollouts[row.request_number, row.attempt].append(row)
        return dict(rollouts)

    @cached_property
    def attempts(self) -> Mapping[int, Sequence[int]]:
        """Request number → its recorded attempts in order, whatever became of them."""
        attempts: dict[int, list[int]] = defaultdict(list)
        for number, attempt in self.rollouts:
            attempts[number].append(attempt)
        return dict(attempts)

    @cached_property
    def failed_attempts(self) -> Mapping[int, frozenset[int]]:
        """Request number → its attempts that are written down as failed."""
        failed: dict[int, set[int]] = defaultdict(set)
        for row in self.failed:
            failed[row.request_number].add(row.attempt)
        return {number: frozenset(attempts) for number, attempts in failed.items()}

    @cached_property
    def steps(self) -> Sequence[Row[Any]]:
        """Surviving updates by step."""
        return sorted((row for row in self.updates if not row.superseded), key=lambda row: row.step)

    @property
    def last_step(self) -> int:
        """The last surviving step; 0 before the first update."""
        return self.steps[-1].step if self.steps else 0

    def counts(self, number: int, attempt: int) -> bool:
        """Whether an attempt has a rollout that counts, in any of its segments."""
        return any(row.state in COUNTING for row in self.rollouts.get((number, attempt), ()))


def read_snapshot(ledger: Ledger, run_id: str) -> Snapshot:
    """Read the run in one transaction that sees one moment on both databases.

    Raises:
        UnknownRun: there is none of that id.
    """

    def read(connection: Connection) -> Snapshot:
        if not ledger.is_sqlite:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

        def rows(columns: Iterable[Any], of: Any, *order: Any) -> Sequence[Row[Any]]:
            return connection.execute(select(*columns).where(of == run_id).order_by(*order)).all()

        run = connection.execute(select(*Run.__table__.c).where(Run.run_id == run_id)).one_or_none()
        if run is None:
            raise UnknownRun(f"there is no run {run_id} in {ledger.label}")
        changes = rows((ConfigChange.setting, ConfigChange.old_json), ConfigChange.run_id)
        orders = rows((EvaluationOrder.version, EvaluationOrder.reported), EvaluationOrder.run_id)
        frontiers = rows((Frontier.closed,), Frontier.run_id)
        entry = TrajectoryEntry
        return Snapshot(
            run=run,
            requests={row.number: row for row in rows(_REQUEST, Request.run_id, Request.number)},
            trajectories=rows(_TRAJECTORY, entry.run_id, entry.request_number, entry.attempt, entry.segment),
            failed=rows(_FAILED, FailedAttempt.run_id),
            updates=rows(_UPDATE, Update.run_id, Update.update_id),
            policies=rows(Policy.__table__.c, Policy.run_id, Policy.version),
            checkpoints=rows(Checkpoint.__table__.c, Checkpoint.run_id, Checkpoint.step),
            parts=rows(RolloutPart.__table__.c, RolloutPart.run_id, RolloutPart.part_id),
            unreported=[row.version for row in orders if not row.reported],
            max_attempts=frozenset(
                [run.max_attempts, *(int(json.loads(c.old_json)) for c in changes if c.setting == MAX_ATTEMPTS)]
            ),
            tasks_over=any(row.closed for row in frontiers),
        )

    return ledger.transact(read, Mode.READ)
