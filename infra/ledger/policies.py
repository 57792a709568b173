"""Policy versions in the ledger: announced, looked up, and removed once nobody can still be loading them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from infra.ledger.database import Database, clock, reads, writes, writes_durably
from infra.ledger.records import LedgerError, NewPolicy, PolicyRecord, RequestState
from infra.ledger.transitions import chunks, insert_all, require_attempt
from infra.models import Checkpoint, Evaluation, Policy, Request, Run, Worker
from sao_core.trajectory import Purpose

GONE = ("stopped", "failed")
"""Worker states after which nothing is loaded any more."""


class PolicyLedger(Database):
    """The announcement board of policy versions."""

    @writes_durably
    def add_policy(
        self,
        connection: Connection,
        run_id: str,
        policy: NewPolicy,
        step: int,
        parent_version: int | None = None,
        *,
        attempt: int | None = None,
    ) -> None:
        """Announce a policy that no update made: the initial one, or the one after a warm start.

        Raises:
            Fenced: the caller is of an earlier attempt of the run.
            LedgerError: its version is not the next one.
        """
        attempt = require_attempt(connection, run_id, attempt)
        insert_policy(connection, run_id, step, parent_version, policy, attempt)

    @writes
    def announce(self, connection: Connection, run_id: str, version: int, *, attempt: int | None = None) -> None:
        """Announce a stored version again, for this attempt of the run: what a resumed run starts from."""
        attempt = require_attempt(connection, run_id, attempt)
        stored = (Policy.run_id == run_id, Policy.version == version, Policy.removed_at.is_(None), ~Policy.superseded)
        if not connection.execute(update(Policy).where(*stored).values(attempt=attempt)).rowcount:
            raise LedgerError(f"policy version {version} of run {run_id} is superseded or not in the store")

    @reads
    def next_version(self, connection: Connection, run_id: str) -> int:
        """The number of the next new policy: one more than any there was."""
        return next_version(connection, run_id)

    @reads
    def newest_policy(self, connection: Connection, run_id: str, *, announced: bool = False) -> PolicyRecord | None:
        """The newest surviving policy; with ``announced``, of those that the run's current attempt announced.

        Workers wait for an announced one, so that no rollout starts before a resumed learner has its weights.
        """
        where = [Policy.run_id == run_id, ~Policy.superseded]
        if announced:
            where.append(Policy.attempt == select(Run.attempt).where(Run.run_id == run_id).scalar_subquery())
        statement = select(Policy.__table__).where(*where).order_by(Policy.version.desc()).limit(1)
        row = connection.execute(statement).one_or_none()
        return None if row is None else policy_record(row)

    @reads
    def policy(self, connection: Connection, run_id: str, version: int) -> PolicyRecord:
        """One policy version.

        Raises:
            LedgerError: there is none of that number.
        """
        statement = select(Policy.__table__).where(Policy.run_id == run_id, Policy.version == version)
        row = connection.execute(statement).one_or_none()
        if row is None:
            raise LedgerError(f"run {run_id} has no policy version {version}")
        return policy_record(row)

    @reads
    def policies(self, connection: Connection, run_id: str) -> list[PolicyRecord]:
        """Every policy version, superseded and removed ones too, in order."""
        statement = select(Policy.__table__).where(Policy.run_id == run_id).order_by(Policy.version)
        return [policy_record(row) for row in connection.execute(statement)]

    @reads
    def policy_steps(self, connection: Connection, run_id: str, since_version: int = 0) -> dict[int, int]:
        """Version → step, from ``since_version`` on; for a superseded policy, of its last surviving ancestor."""
        columns = (Policy.version, Policy.step, Policy.parent_version, Policy.superseded)
        statement = select(*columns).where(Policy.run_id == run_id, Policy.version >= since_version)
        known = {row.version: row for row in connection.execute(statement)}
        steps: dict[int, int] = {}
        for version in sorted(known):
            row = known[version]
            if not row.superseded:
                steps[version] = row.step
            elif row.parent_version in steps:
                steps[version] = steps[row.parent_version]
            else:
                steps[version] = _surviving_step(connection, run_id, row.parent_version)
        return steps

    @writes_durably
    def remove_policies(
        self,
        connection: Connection,
        run_id: str,
        keep: int,
        silent_s: float,
        *,
        attempt: int | None = None,
    ) -> list[PolicyRecord]:
        """Mark policies as removed that nothing needs, and return them; their files can go now.

        Kept: the ``keep`` newest surviving ones, those that a checkpoint resumes from, that were or will be evaluated,
        that a live worker (heard of in the last ``silent_s``) holds, and for a rollout worker everything newer, since
        it may be loading any of them. A worker that has not loaded its first one yet keeps everything.
        """
        require_attempt(connection, run_id, attempt)
        statement = select(Policy.__table__).where(Policy.run_id == run_id, Policy.removed_at.is_(None))
        stored = [policy_record(row) for row in connection.execute(statement.order_by(Policy.version.desc()))]
        in_use = versions_in_use(connection, run_id, silent_s)
        surviving = [policy for policy in stored if not policy.superseded]
        needed = {policy.version for policy in surviving[:keep]}
        needed |= _evaluated(connection, run_id)
        steps = select(Checkpoint.step).where(Checkpoint.run_id == run_id, ~Checkpoint.superseded)
        for step in connection.execute(steps).scalars():
            needed |= {policy.version for policy in [p for p in surviving if p.step <= step][:1]}
        gone = [policy for policy in stored if policy.version not in needed and not in_use(policy.version)]
        mark_removed(connection, run_id, gone)
        return gone


def versions_in_use(connection: Connection, run_id: str, silent_s: float) -> Callable[[int], bool]:
    """Whether a live worker (heard of in the last ``silent_s``) holds a version, or may be loading it.

    A rollout worker may be loading anything newer than what it holds, one that has not loaded its first yet anything.
    """
    workers = connection.execute(
        select(Worker.version, Worker.purposes).where(
            Worker.run_id == run_id,
            Worker.purposes != "",
            Worker.heartbeat_at > clock() - silent_s,
            Worker.state.not_in(GONE),
        )
    ).all()
    if any(worker.version is None for worker in workers):
        return lambda version: True
    held = {worker.version for worker in workers}
    floor = min((worker.version for worker in workers if worker.purposes != Purpose.EVALUATE), default=math.inf)
    return lambda version: version in held or version >= floor


def mark_removed(connection: Connection, run_id: str, policies: Iterable[PolicyRecord]) -> None:
    """Say that the files of these versions can go now."""
    for chunk in chunks(policy.version for policy in policies):
        where = (Policy.run_id == run_id, Policy.version.in_(chunk))
        connection.execute(update(Policy).where(*where).values(removed_at=clock()))


def next_version(connection: Connection, run_id: str) -> int:
    """The number of the next new policy, inside a transaction."""
    newest = connection.execute(select(func.max(Policy.version)).where(Policy.run_id == run_id)).scalar_one_or_none()
    return 0 if newest is None else newest + 1


def insert_policy(
    connection: Connection, run_id: str, step: int, parent_version: int | None, policy: NewPolicy, attempt: int
) -> None:
    """Announce a new policy, inside a transaction."""
    expected = next_version(connection, run_id)
    if policy.version != expected:
        raise LedgerError(f"the next policy version of run {run_id} is {expected}: got {policy.version}")
    row = {
        "run_id": run_id,
        "version": policy.version,
        "step": step,
        "parent_version": parent_version,
        "object_key": policy.object_key,
        "sha256": policy.sha256,
        "superseded": False,
        "attempt": attempt,
        "published_at": connection.execute(select(clock())).scalar_one(),
    }
    insert_all(connection, Policy, [row])


def _surviving_step(connection: Connection, run_id: str, version: int | None) -> int:
    while version is not None:
        statement = select(Policy.step, Policy.parent_version, Policy.superseded).where(
            Policy.run_id == run_id, Policy.version == version
        )
        row = connection.execute(statement).one()
        if not row.superseded:
            return row.step
        version = row.parent_version
    return 0


def _evaluated(connection: Connection, run_id: str) -> set[int]:
    done = select(Evaluation.version).where(Evaluation.run_id == run_id)
    asked = select(Request.policy_version).where(
        Request.run_id == run_id,
        Request.policy_version.is_not(None),
        Request.state.in_([RequestState.PENDING, RequestState.LEASED]),
    )
    versions: Iterable[Any] = connection.execute(done.union(asked)).scalars()
    return set(versions)


def policy_record(row: Row[Any]) -> PolicyRecord:
    """A row of the table as a record."""
    return PolicyRecord(
        run_id=row.run_id,
        version=row.version,
        step=row.step,
        parent_version=row.parent_version,
        object_key=row.object_key,
        sha256=row.sha256,
        superseded=row.superseded,
        published_at=row.published_at,
        removed_at=row.removed_at,
    )
