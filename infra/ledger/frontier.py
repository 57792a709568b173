"""The prompt frontier in the ledger: how many prompts were issued, and whether more will come."""

from __future__ import annotations

from sqlalchemy import Connection, and_, func, or_, select, update

from infra.ledger.database import Database, reads, writes
from infra.ledger.records import TRAINING, RequestState, TrajectoryState
from infra.ledger.transitions import insert_new
from infra.models import Frontier, Request, TrajectoryEntry
from sao_core.trajectory import Purpose


class FrontierLedger(Database):
    """Where the walk over the tasks stands."""

    @reads
    def prompts_issued(self, connection: Connection, run_id: str, purpose: Purpose = Purpose.TRAIN) -> int:
        """How many prompts of a purpose were issued so far (a group counts once): the prompt frontier."""
        return prompts_issued(connection, run_id, purpose)

    @writes
    def close_frontier(self, connection: Connection, run_id: str) -> None:
        """Say that no prompt for training will be issued any more; it stays so."""
        advance_frontier(connection, run_id, Purpose.TRAIN, 0, None)
        mine = (Frontier.run_id == run_id, Frontier.purpose == Purpose.TRAIN)
        connection.execute(update(Frontier).where(*mine).values(closed=True))

    @reads
    def rest(self, connection: Connection, run_id: str, step: int) -> int | None:
        """How many rollouts the last updates have to share, those claimed for ``step`` included.

        None as long as more may come: prompts that were not issued yet, or rollouts in the making.
        """
        closed = select(Frontier.closed).where(Frontier.run_id == run_id, Frontier.purpose == Purpose.TRAIN)
        if not connection.execute(closed).scalar_one_or_none():
            return None
        making = select(func.count()).where(
            Request.run_id == run_id,
            Request.state.in_([RequestState.PENDING, RequestState.LEASED]),
            Request.purpose.in_(TRAINING),
        )
        if connection.execute(making).scalar_one():
            return None
        claimed = and_(TrajectoryEntry.state == TrajectoryState.CLAIMED, TrajectoryEntry.claimed_step == step)
        there = select(func.count()).where(
            TrajectoryEntry.run_id == run_id,
            or_(TrajectoryEntry.state == TrajectoryState.READY, claimed),
            TrajectoryEntry.purpose.in_(TRAINING),
            TrajectoryEntry.segment == 0,
        )
        return connection.execute(there).scalar_one()


def prompts_issued(connection: Connection, run_id: str, purpose: Purpose) -> int:
    """The prompt frontier of a purpose, inside a transaction."""
    statement = select(Frontier.prompts).where(Frontier.run_id == run_id, Frontier.purpose == purpose)
    return connection.execute(statement).scalar_one_or_none() or 0


def advance_frontier(connection: Connection, run_id: str, purpose: Purpose, prompts: int, expected: int | None) -> bool:
    """Move the frontier of a purpose on; False if it is not where it was ``expected``."""
    insert_new(connection, Frontier, {"run_id": run_id, "purpose": purpose, "prompts": 0, "closed": False})
    statement = update(Frontier).where(Frontier.run_id == run_id, Frontier.purpose == purpose)
    if expected is not None:
        statement = statement.where(Frontier.prompts == expected)
    return connection.execute(statement.values(prompts=Frontier.prompts + prompts)).rowcount == 1
