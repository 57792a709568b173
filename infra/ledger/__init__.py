"""The run's truth in SQL: who asked for what, what was made of it, which weights came of it.

`Ledger` is the one door. Every method is one transaction on SQLite (WAL) or Postgres and safe to call again:

    flow      issue ──▶ requests ── lease ──▶ worker ── record ──▶ trajectories ── claim ──▶ learner
    worker    record_part: what a long rollout has so far; the next lease of its request hands it on
    learner   commit_update: update row + trajectories + frontier + policy, at once; rewind undoes the tail
    tracking  updates_since(watermark)

Nothing here reads or writes files of the object store.
"""

from __future__ import annotations

from infra.ledger.evaluations import EvaluationLedger
from infra.ledger.frontier import FrontierLedger
from infra.ledger.history import TrajectoryHistory
from infra.ledger.parts import PartLedger
from infra.ledger.policies import PolicyLedger
from infra.ledger.records import (
    TRAINING,
    CheckpointRecord,
    ConfigChangeRecord,
    EvaluationRecord,
    Fenced,
    LedgerError,
    LedgerRefused,
    LedgerTooNew,
    NewPolicy,
    NewRequest,
    Notable,
    PartRow,
    PartState,
    PolicyRecord,
    Progress,
    RequestState,
    RunRecord,
    RunStatus,
    TrajectoryRow,
    TrajectoryState,
    UnknownRun,
    UpdateRow,
    WorkerRecord,
)
from infra.ledger.requests import RequestLedger
from infra.ledger.runs import RunLedger
from infra.ledger.schema import ensure_schema
from infra.ledger.trajectories import TrajectoryLedger
from infra.ledger.updates import UpdateLedger

__all__ = [
    "TRAINING",
    "CheckpointRecord",
    "ConfigChangeRecord",
    "EvaluationRecord",
    "Fenced",
    "Ledger",
    "LedgerError",
    "LedgerRefused",
    "LedgerTooNew",
    "NewPolicy",
    "NewRequest",
    "Notable",
    "PartRow",
    "PartState",
    "PolicyRecord",
    "Progress",
    "RequestState",
    "RunRecord",
    "RunStatus",
    "TrajectoryRow",
    "TrajectoryState",
    "UnknownRun",
    "UpdateRow",
    "WorkerRecord",
]


class Ledger(
    RunLedger,
    FrontierLedger,
    RequestLedger,
    PartLedger,
    TrajectoryLedger,
    TrajectoryHistory,
    UpdateLedger,
    PolicyLedger,
    EvaluationLedger,
):
    """The ledger at a database URL, migrated to this code's schema; safe to share between threads, not processes."""

    def __init__(self, url: str, *, patience_s: float = 60.0, first_contact_s: float | None = None) -> None:
        """Open ``url`` (`sqlite:///…` or `postgresql://…`) and bring its schema up to date under a lock.

        Operations wait up to ``patience_s`` for a database that is away, then raise :class:`LedgerError`; to be opened
        it is waited for ``first_contact_s`` (default: as long), for a person may have mistyped its address.

        Raises:
            LedgerRefused: wrong password, no such database, no right to use it.
            LedgerTooNew: a newer version of this code wrote the database.
        """
        super().__init__(url, patience_s=patience_s if first_contact_s is None else first_contact_s)
        ensure_schema(self)
        self.patience_s = patience_s
