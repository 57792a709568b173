"""Steps, policies and checkpoints in the ledger: committed in one transaction, undone by a rewind, never renumbered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, delete, exists, func, select, update

from infra.ledger.database import Database, clock, reads, writes_durably
from infra.ledger.frontier import prompts_issued
from infra.ledger.policies import insert_policy
from infra.ledger.records import (
    CheckpointRecord,
    LedgerError,
    NewPolicy,
    RequestState,
    TrajectoryState,
    UpdateRow,
)
from infra.ledger.trajectories import claimed_rows, reject
from infra.ledger.transitions import (
    GivenUp,
    chunks,
    count_failures,
    dump_metrics,
    give_up,
    insert_all,
    insert_new,
    load_metrics,
    lock_requests,
    require_attempt,
)
from infra.models import Checkpoint, FailedAttempt, Policy, Request, TrajectoryEntry, Update
from sao_core.trajectory import Purpose


class UpdateLedger(Database):
    """What the learner did."""

    @writes_durably
    def commit_update(
        self,
        connection: Connection,
        run_id: str,
        step: int,
        version_before: int,
        version_after: int,
        metrics: Mapping[str, float],
        trained: Iterable[str],
        rejected: Mapping[str, str],
        policy: NewPolicy | None,
        checkpoint_key: str | None = None,
        *,
        attempt: int | None = None,
    ) -> bool:
        """Commit a step whole: its row, its trajectories, its prompt frontier, its policy; False if it was before.

        ``trained`` and ``rejected`` name rollouts by the id of any of their segments; together they are exactly what
        `claim` gave for this step. A rejected rollout's request is reissued or exhausted; one of a group is only
        counted, because its group was consumed.

        Raises:
            Fenced: the caller is of an earlier attempt of the run.
            LedgerError: the step leaves a gap, was committed differently, does not account for its claim, or its
                versions do not follow.
        """
        attempt = require_attempt(connection, run_id, attempt)
        if _is_committed(connection, run_id, step, version_before, version_after):
            return False
        _check_versions(connection, run_id, step, version_before, version_after, policy)
        claimed = claimed_rows(connection, run_id, step)
        number_of = {row.trajectory_id: row.request_number for row in claimed}
        unknown = [name for name in (*trained, *rejected) if name not in number_of]
        if unknown:
            raise LedgerError(f"step {step} of run {run_id}: {unknown[0]} was not claimed for it")
        why = {number_of[name]: reason for name, reason in rejected.items()}
        trained_numbers = {number_of[name] for name in trained} - why.keys()
        left = set(number_of.values()) - trained_numbers - why.keys()
        if left:
            raise LedgerError(
                f"step {step} of run {run_id}: request {min(left)} ({len(left)} in all) was claimed, "
                "but neither trained nor rejected"
            )
        for chunk in chunks(sorted(trained_numbers)):
            connection.execute(
                update(TrajectoryEntry)
                .where(
                    TrajectoryEntry.run_id == run_id,
                    TrajectoryEntry.state == TrajectoryState.CLAIMED,
                    TrajectoryEntry.claimed_step == step,
                    TrajectoryEntry.request_number.in_(chunk),
                )
                .values(state=TrajectoryState.TRAINED, trained_step=step)
            )
        _reject(connection, run_id, step, claimed, why)
        if policy is not None:
            insert_policy(connection, run_id, step, version_before, policy, attempt)
        row = {
            "run_id": run_id,
            "step": step,
            "version_before": version_before,
            "version_after": version_after,
            "num_trajectories": sum(row.request_number in trained_numbers for row in claimed),
            "metrics_json": dump_metrics(metrics),
            "prompts_issued": prompts_issued(connection, run_id, Purpose.TRAIN),
            "checkpoint_key": checkpoint_key,
            "superseded": False,
            "committed_at": connection.execute(select(clock())).scalar_one(),
        }
        insert_all(connection, Update, [row])
        return True

    @writes_durably
    def rewind(self, connection: Connection, run_id: str, step: int, *, attempt: int | None = None) -> None:
        """Go back to the state after ``step`` (a complete checkpoint; 0: before the first update).

        Later updates, policies and checkpoints are superseded; what they trained and what is claimed is ready again,
        and so is a member that they refused of a group, which is trained whole or not at all. Other rollouts that were
        rejected stay so: their requests were reissued. Doing it twice changes nothing more.

        Raises:
            LedgerError: the step was never reached.
        """
        require_attempt(connection, run_id, attempt)
        last = last_step(connection, run_id)
        if step > last:
            raise LedgerError(f"run {run_id} cannot go back to step {step}: its last one is {last}")
        again = {
            "state": TrajectoryState.READY,
            "claimed_step": None,
            "trained_step": None,
            "rewound": TrajectoryEntry.rewound + 1,
        }
        mine = TrajectoryEntry.run_id == run_id
        trained = (mine, TrajectoryEntry.trained_step > step, TrajectoryEntry.state == TrajectoryState.TRAINED)
        connection.execute(update(TrajectoryEntry).where(*trained).values(**again))
        claimed = (mine, TrajectoryEntry.state == TrajectoryState.CLAIMED)
        connection.execute(update(TrajectoryEntry).where(*claimed).values(**again))
        _take_back_refused_members(connection, run_id, step, again)
        for model in (Update, Policy, Checkpoint):
            later = (model.run_id == run_id, model.step > step, ~model.superseded)
            connection.execute(update(model).where(*later).values(superseded=True))

    @reads
    def last_step(self, connection: Connection, run_id: str) -> int:
        """The last surviving step; 0 before the first update."""
        return last_step(connection, run_id)

    @reads
    def updates_since(
        self, connection: Connection, run_id: str, watermark: int, limit: int | None = None
    ) -> list[UpdateRow]:
        """Surviving updates after step ``watermark``, in order."""
        statement = (
            select(Update.__table__)
            .where(Update.run_id == run_id, ~Update.superseded, Update.step > watermark)
            .order_by(Update.step)
            .limit(limit)
        )
        return [_update_row(row) for row in connection.execute(statement)]

    @reads
    def last_update(self, connection: Connection, run_id: str) -> UpdateRow | None:
        """The last surviving update."""
        statement = select(Update.__table__).where(Update.run_id == run_id, ~Update.superseded)
        row = connection.execute(statement.order_by(Update.step.desc()).limit(1)).one_or_none()
        return None if row is None else _update_row(row)

    @reads
    def superseded_steps(self, connection: Connection, run_id: str) -> list[int]:
        """Steps that were committed once and undone by a rewind."""
        statement = select(Update.step).where(Update.run_id == run_id, Update.superseded).distinct()
        return list(connection.execute(statement.order_by(Update.step)).scalars())

    @writes_durably
    def set_checkpoint(
        self, connection: Connection, run_id: str, step: int, key: str, sha256: str, *, attempt: int | None = None
    ) -> str | None:
        """Announce a checkpoint whose files are complete; step 0 is the one before the first update.

        Returns where the superseded checkpoint of this step lies that it takes the place of: those files can go now.

        Raises:
            Fenced: the caller is of an earlier attempt of the run.
            LedgerError: the step was not committed.
        """
        require_attempt(connection, run_id, attempt)
        if step > last_step(connection, run_id):
            raise LedgerError(f"run {run_id}: a checkpoint of step {step} needs that step to be committed first")
        values = {"object_key": key, "sha256": sha256, "created_at": clock(), "superseded": False, "name": None}
        where = (Checkpoint.run_id == run_id, Checkpoint.step == step)
        before = connection.execute(select(Checkpoint.object_key).where(*where)).scalar_one_or_none()
        if before is None:
            insert_new(connection, Checkpoint, {"run_id": run_id, "step": step, **values})
        else:
            connection.execute(update(Checkpoint).where(*where).values(**values))
        surviving = (Update.run_id == run_id, Update.step == step, ~Update.superseded)
        connection.execute(update(Update).where(*surviving).values(checkpoint_key=key))
        return None if before == key else before

    @reads
    def latest_checkpoint(self, connection: Connection, run_id: str) -> CheckpointRecord | None:
        """The newest surviving checkpoint."""
        return next(iter(_checkpoints(connection, run_id, limit=1)), None)

    @reads
    def checkpoints(self, connection: Connection, run_id: str) -> list[CheckpointRecord]:
        """Surviving checkpoints, newest first."""
        return _checkpoints(connection, run_id)

    @writes_durably
    def name_checkpoint(self, connection: Connection, run_id: str, step: int, name: str | None) -> None:
        """Give a checkpoint a name, so that retention keeps it; None takes the name away. A name is given once per run.

        Raises:
            LedgerError: there is no such checkpoint, or another one has this name.
        """
        known = {record.step: record for record in _checkpoints(connection, run_id)}
        if step not in known:
            steps = ", ".join(map(str, sorted(known))) or "none"
            raise LedgerError(f"run {run_id} has no checkpoint of step {step}; there are: {steps}")
        taken = [record.step for record in known.values() if name is not None and record.name == name]
        if taken and taken != [step]:
            raise LedgerError(f"the checkpoint of step {taken[0]} of run {run_id} is called {name} already")
        where = (Checkpoint.run_id == run_id, Checkpoint.step == step)
        connection.execute(update(Checkpoint).where(*where).values(name=name))

    @writes_durably
    def remove_checkpoints(
        self, connection: Connection, run_id: str, keep: int, *, attempt: int | None = None
    ) -> list[CheckpointRecord]:
        """Forget all but the ``keep`` newest and the named surviving checkpoints; returns those, whose files can go."""
        require_attempt(connection, run_id, attempt)
        surviving = _checkpoints(connection, run_id)
        kept = {record.step for record in [*surviving[:keep], *(r for r in surviving if r.name is not None)]}
        everything = _checkpoints(connection, run_id, superseded=True)
        gone = [record for record in everything if record.step not in kept]
        for chunk in chunks(record.step for record in gone):
            connection.execute(delete(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.step.in_(chunk)))
            either = Update.superseded.in_([False, True])  # named, since the index by step begins with it
            stepped = (Update.run_id == run_id, either, Update.step.in_(chunk))
            connection.execute(update(Update).where(*stepped).values(checkpoint_key=None))
        return gone


def last_step(connection: Connection, run_id: str) -> int:
    """The last surviving step, inside a transaction; 0 before the first update."""
    statement = select(func.max(Update.step)).where(Update.run_id == run_id, ~Update.superseded)
    return connection.execute(statement).scalar_one_or_none() or 0


def _is_committed(connection: Connection, run_id: str, step: int, version_before: int, version_after: int) -> bool:
    surviving = select(Update.version_before, Update.version_after).where(
        Update.run_id == run_id, Update.step == step, ~Update.superseded
    )
    row = connection.execute(surviving).one_or_none()
    if row is None:
        last = last_step(connection, run_id)
        if step != last + 1:
            raise LedgerError(f"run {run_id}: after step {last} comes step {last + 1}: got {step}")
        return False
    if tuple(row) != (version_before, version_after):
        raise LedgerError(
            f"step {step} of run {run_id} was committed with versions {row[0]} → {row[1]}: "
            f"got {version_before} → {version_after}"
        )
    return True


def _check_versions(
    connection: Connection, run_id: str, step: int, before: int, after: int, policy: NewPolicy | None
) -> None:
    known = select(Policy.version).where(Policy.run_id == run_id, Policy.version == before, ~Policy.superseded)
    if connection.execute(known).first() is None:
        raise LedgerError(f"step {step} of run {run_id} starts from policy version {before}, which is not there")
    expected = before if policy is None else policy.version
    if after != expected:
        raise LedgerError(f"step {step} of run {run_id} ends with policy version {expected}: got {after}")


def _reject(
    connection: Connection, run_id: str, step: int, claimed: Iterable[Row[Any]], why: Mapping[int, str]
) -> None:
    first = {row.request_number: row for row in claimed if row.segment == 0 and row.request_number in why}
    lock_requests(connection, run_id, why)
    reject(connection, run_id, step, why)
    attempts = {number: GivenUp(number, row.attempt, None, why[number]) for number, row in sorted(first.items())}
    give_up(connection, run_id, [a for n, a in attempts.items() if first[n].group_number is None])
    count_failures(connection, run_id, [a for n, a in attempts.items() if first[n].group_number is not None])


def _take_back_refused_members(connection: Connection, run_id: str, step: int, again: Mapping[str, Any]) -> None:
    """Make ready again what steps after ``step`` refused of the groups that they consumed; it has not failed then."""
    consumed = exists().where(
        Request.run_id == TrajectoryEntry.run_id,
        Request.number == TrajectoryEntry.request_number,
        Request.attempts == TrajectoryEntry.attempt,
        Request.state == RequestState.DONE,
    )
    refused = (
        TrajectoryEntry.run_id == run_id,
        TrajectoryEntry.group_number.is_not(None),
        TrajectoryEntry.state == TrajectoryState.REJECTED,
        TrajectoryEntry.claimed_step > step,
    )
    members = connection.execute(
        update(TrajectoryEntry)
        .where(*refused, consumed)
        .values(**again, reject_reason=None)
        .returning(TrajectoryEntry.request_number, TrajectoryEntry.attempt)
    )
    for number, attempt in sorted(set(members.tuples())):
        one = (FailedAttempt.run_id == run_id, FailedAttempt.request_number == number, FailedAttempt.attempt == attempt)
        connection.execute(delete(FailedAttempt).where(*one))


def _checkpoints(
    connection: Connection, run_id: str, limit: int | None = None, superseded: bool = False
) -> list[CheckpointRecord]:
    statement = select(Checkpoint.__table__).where(Checkpoint.run_id == run_id)
    if not superseded:
        statement = statement.where(~Checkpoint.superseded)
    rows = connection.execute(statement.order_by(Checkpoint.step.desc()).limit(limit))
    return [CheckpointRecord(row.step, row.object_key, row.sha256, row.created_at, row.name) for row in rows]


def _update_row(row: Row[Any]) -> UpdateRow:
    return UpdateRow(
        step=row.step,
        version_before=row.version_before,
        version_after=row.version_after,
        num_trajectories=row.num_trajectories,
        metrics=load_metrics(row.metrics_json),
        checkpoint_key=row.checkpoint_key,
        committed_at=row.committed_at,
        prompts_issued=row.prompts_issued,
    )
