"""What upkeep finds and changes in the ledger: leases that ran out, runs whose processes are gone, what a rewind left.

Each is one transaction that looks again at what it relies on, so that a run which was resumed meanwhile is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, update

from infra.ledger import Ledger
from infra.ledger.database import Mode, clock
from infra.ledger.policies import mark_removed, policy_record, versions_in_use
from infra.ledger.records import CheckpointRecord, PolicyRecord, RequestState, RunStatus
from infra.ledger.requests import take_back
from infra.ledger.runs import give_back
from infra.ledger.transitions import require_attempt
from infra.models import Checkpoint, EvaluationOrder, Policy, Request, Run, Update, Worker


@dataclass(frozen=True)
class ExpiredLease:
    """A request whose worker has been silent for too long."""

    number: int
    worker: str
    silent_s: float
    """Since the end of the lease."""


def expire_leases(ledger: Ledger, run_id: str, *, alive: bool, dry_run: bool = False) -> list[ExpiredLease]:
    """Take back the leases of a run that ran out; returns them.

    In a run that is ``alive`` it costs their requests an attempt, as it would when a worker asks for work. Otherwise
    they go back as they would with a resume, which costs nothing.
    """
    out = (Request.run_id == run_id, Request.state == RequestState.LEASED, Request.lease_until <= clock())

    def expire(connection: Connection) -> list[ExpiredLease]:
        columns = (Request.number, Request.lease_worker, (clock() - Request.lease_until).label("silent_s"))
        statement = select(*columns).where(*out).order_by(Request.number)
        found = [
            ExpiredLease(row.number, row.lease_worker or "", row.silent_s) for row in connection.execute(statement)
        ]
        if dry_run or not found:
            return found
        if alive:
            take_back(connection, run_id)
        else:
            give_back(connection, run_id, Request.lease_until <= clock())
        return found

    return ledger.transact(expire, Mode.READ if dry_run else Mode.WRITE)


def silence_s(ledger: Ledger, run_id: str) -> float:
    """Seconds since the last sign of life of a run: creation, the start of an attempt, a heartbeat."""

    def read(connection: Connection) -> float:
        signs = select(Run.created_at, Run.attempt_started_at, clock().label("now")).where(Run.run_id == run_id)
        run = connection.execute(signs).one()
        beat = connection.execute(select(func.max(Worker.heartbeat_at)).where(Worker.run_id == run_id)).scalar_one()
        return max(0.0, run.now - max(run.created_at, run.attempt_started_at or 0.0, beat or 0.0))

    return ledger.transact(read, Mode.READ)


def interrupt(ledger: Ledger, run_id: str, silent_s: float, message: str) -> bool:
    """Say that a run was interrupted, unless it has ended or has given a sign of life in the last ``silent_s``."""

    def mark(connection: Connection) -> bool:
        heard = select(Worker.worker).where(Worker.run_id == run_id, Worker.heartbeat_at > clock() - silent_s)
        statement = update(Run).where(
            Run.run_id == run_id,
            Run.status == RunStatus.RUNNING,
            func.coalesce(Run.attempt_started_at, Run.created_at) <= clock() - silent_s,
            ~heard.exists(),
        )
        values = {"status": RunStatus.INTERRUPTED, "message": message, "ended_at": clock()}
        return connection.execute(statement.values(**values)).rowcount == 1

    return ledger.transact(mark, Mode.DURABLE)


def remove_superseded_policies(
    ledger: Ledger, run_id: str, grace_s: float, silent_s: float, *, dry_run: bool = False
) -> list[PolicyRecord]:
    """Mark superseded policies as removed that nothing needs, and return them; their files can go then.

    Kept: what is younger than ``grace_s`` or was superseded since then (by the start of this attempt), what an
    evaluation that was asked for still needs, what a live worker (heard of in the last ``silent_s``) holds, and for a
    rollout worker everything newer, since it may be loading any of them.
    """

    def remove(connection: Connection) -> list[PolicyRecord]:
        require_attempt(connection, run_id, None, lock=not dry_run)
        in_use = versions_in_use(connection, run_id, silent_s)
        statement = select(Policy.__table__).where(
            Policy.run_id == run_id,
            Policy.superseded,
            Policy.removed_at.is_(None),
            Policy.published_at <= clock() - grace_s,
            _superseded_before(run_id, grace_s),
            ~_evaluation_open(run_id),
        )
        superseded = map(policy_record, connection.execute(statement.order_by(Policy.version)))
        gone = [policy for policy in superseded if not in_use(policy.version)]
        if not dry_run:
            mark_removed(connection, run_id, gone)
        return gone

    return ledger.transact(remove, Mode.READ if dry_run else Mode.DURABLE)


def forget_superseded_checkpoints(
    ledger: Ledger, run_id: str, grace_s: float, *, dry_run: bool = False
) -> list[CheckpointRecord]:
    """Forget superseded checkpoints without a name, and return them; their files can go then.

    For a run that is not alive: a live one may be storing a new one in the same place, and its retention does this.
    """

    def forget(connection: Connection) -> list[CheckpointRecord]:
        require_attempt(connection, run_id, None, lock=not dry_run)
        old = and_(
            Checkpoint.run_id == run_id,
            Checkpoint.superseded,
            Checkpoint.name.is_(None),
            Checkpoint.created_at <= clock() - grace_s,
            _superseded_before(run_id, grace_s),
        )
        rows = connection.execute(select(Checkpoint.__table__).where(old).order_by(Checkpoint.step)).all()
        if not dry_run:
            connection.execute(delete(Checkpoint).where(old))
            keys = [row.object_key for row in rows]
            undone = (Update.run_id == run_id, Update.superseded, Update.checkpoint_key.in_(keys))
            connection.execute(update(Update).where(*undone).values(checkpoint_key=None))
        return [CheckpointRecord(row.step, row.object_key, row.sha256, row.created_at) for row in rows]

    return ledger.transact(forget, Mode.READ if dry_run else Mode.DURABLE)


def _superseded_before(run_id: str, grace_s: float) -> ColumnElement[bool]:
    """A rewind comes with the start of an attempt: whether the current one started before the grace period."""
    started = select(func.coalesce(Run.attempt_started_at, Run.created_at)).where(Run.run_id == run_id)
    return started.scalar_subquery() <= clock() - grace_s


def _evaluation_open(run_id: str) -> ColumnElement[bool]:
    """Whether a policy is pinned by a request that waits, or by an evaluation without a result."""
    waiting = select(Request.number).where(
        Request.run_id == run_id,
        Request.policy_version == Policy.version,
        Request.state.in_([RequestState.PENDING, RequestState.LEASED]),
    )
    ordered = select(EvaluationOrder.version).where(
        EvaluationOrder.run_id == run_id, EvaluationOrder.version == Policy.version, ~EvaluationOrder.reported
    )
    return or_(waiting.exists(), ordered.exists())
