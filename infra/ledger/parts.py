"""Parts of unfinished rollouts in the ledger: recorded under a lease, handed on with it, gone with the record.

What holds after every transaction:

- An open part belongs to a request that is leased or pending; a leased one is at its attempt. The open parts of a
  request are numbered 0, 1, … without a gap and all have the same attempt. (Failed ones of an attempt may be several
  such series: it can start anew, or be given back and leased again.)
- While a request is pending, the newest of its open parts can be restored from.
- The object of every part, open or failed, is stored under its key with its sha256.
- Recording a rollout removes the rows of its parts. Their objects are deleted after that; where a kill comes between,
  nothing refers to them. Failed parts stay.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from infra.ledger.database import Database, clock, reads, writes, writes_durably
from infra.ledger.records import LedgerError, PartRow, PartState, RequestState
from infra.ledger.transitions import fail_parts, insert_all
from infra.models import Request, RolloutPart


class PartLedger(Database):
    """What is known of rollouts that are not finished."""

    @writes_durably
    def record_part(self, connection: Connection, run_id: str, worker: str, row: PartRow) -> bool:
        """Record a stored part; whether it is recorded.

        It is accepted while its attempt is leased to ``worker``, also when the lease has run out but was not taken
        back: nobody else goes on from it then. One that was recorded before from the same object counts as recorded.

        Raises:
            LedgerError: a part before this one is missing.
        """
        if not _holds(connection, run_id, worker, row.request_number, row.attempt):
            return False
        mine = (
            RolloutPart.run_id == run_id,
            RolloutPart.request_number == row.request_number,
            RolloutPart.state == PartState.OPEN,
        )
        known = connection.execute(select(RolloutPart.object_key).where(*mine)).scalars().all()
        if row.object_key in known:
            return True
        if row.part != len(known):
            raise LedgerError(
                f"run {run_id}, request {row.request_number}: part {len(known)} comes next, got part {row.part}"
            )
        values = {
            "run_id": run_id,
            "request_number": row.request_number,
            "attempt": row.attempt,
            "part": row.part,
            "worker": worker,
            "state": PartState.OPEN,
            "restorable": row.restorable,
            "object_key": row.object_key,
            "sha256": row.sha256,
            "num_tokens": row.num_tokens,
            "num_action_tokens": row.num_action_tokens,
            "recorded_at": connection.execute(select(clock())).scalar_one(),
        }
        insert_all(connection, RolloutPart, [values])
        return True

    @writes
    def give_up_parts(self, connection: Connection, run_id: str, worker: str, number: int, attempt: int) -> None:
        """Keep the parts of a request for analysis only: ``worker`` starts its attempt anew.

        An attempt that is not leased to ``worker`` any more changes nothing.
        """
        if _holds(connection, run_id, worker, number, attempt):
            fail_parts(connection, run_id, [number])

    @reads
    def parts(
        self,
        connection: Connection,
        run_id: str,
        number: int | None = None,
        attempt: int | None = None,
        *,
        state: PartState | None = None,
    ) -> list[PartRow]:
        """Parts of a run, a request or an attempt, in the order in which they were recorded."""
        where = [RolloutPart.run_id == run_id]
        if number is not None:
            where.append(RolloutPart.request_number == number)
        if attempt is not None:
            where.append(RolloutPart.attempt == attempt)
        if state is not None:
            where.append(RolloutPart.state == state)
        statement = select(RolloutPart.__table__).where(*where).order_by(RolloutPart.part_id)
        return [_part_row(row) for row in connection.execute(statement)]


def _holds(connection: Connection, run_id: str, worker: str, number: int, attempt: int) -> bool:
    """Whether an attempt is leased to ``worker``; the request is locked."""
    columns = (Request.state, Request.lease_worker, Request.attempts)
    where = (Request.run_id == run_id, Request.number == number)
    request = connection.execute(select(*columns).where(*where).with_for_update()).one_or_none()
    return request is not None and tuple(request) == (RequestState.LEASED, worker, attempt)


def _part_row(row: Row[Any]) -> PartRow:
    return PartRow(
        request_number=row.request_number,
        attempt=row.attempt,
        part=row.part,
        restorable=row.restorable,
        object_key=row.object_key,
        sha256=row.sha256,
        num_tokens=row.num_tokens,
        num_action_tokens=row.num_action_tokens,
        state=PartState(row.state),
        worker=row.worker,
        recorded_at=row.recorded_at,
    )
