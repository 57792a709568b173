"""Evaluations in the ledger: asked for by pinned requests, reported once per policy version and suite."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select, update

from infra.ledger.database import Database, clock, reads, writes_durably
from infra.ledger.records import EvaluationRecord
from infra.ledger.transitions import dump_metrics, insert_new, load_metrics
from infra.models import Evaluation, EvaluationOrder


class EvaluationLedger(Database):
    """How good the policies are."""

    @writes_durably
    def add_evaluation(
        self,
        connection: Connection,
        run_id: str,
        step: int,
        version: int,
        suite: str,
        metrics: Mapping[str, float],
        policy_sha256: str,
    ) -> bool:
        """Store the result of a suite on a policy version; False if it was there (then the first one stands)."""
        row = {
            "run_id": run_id,
            "step": step,
            "version": version,
            "suite": suite,
            "metrics_json": dump_metrics(metrics),
            "policy_sha256": policy_sha256,
            "created_at": clock(),
        }
        ordered = (EvaluationOrder.run_id == run_id, EvaluationOrder.version == version)
        connection.execute(update(EvaluationOrder).where(*ordered).values(reported=True))
        return insert_new(connection, Evaluation, row)

    @reads
    def unreported_evaluations(self, connection: Connection, run_id: str) -> list[int]:
        """Policy versions whose evaluation was asked for and that have no result yet."""
        statement = select(EvaluationOrder.version).where(EvaluationOrder.run_id == run_id, ~EvaluationOrder.reported)
        return list(connection.execute(statement.order_by(EvaluationOrder.version)).scalars())

    @reads
    def evaluations(self, connection: Connection, run_id: str, after: int = 0) -> list[EvaluationRecord]:
        """Evaluation results with a number over ``after``, in the order in which they came."""
        statement = (
            select(Evaluation.__table__)
            .where(Evaluation.run_id == run_id, Evaluation.number > after)
            .order_by(Evaluation.number)
        )
        return [
            EvaluationRecord(
                number=row.number,
                step=row.step,
                version=row.version,
                suite=row.suite,
                metrics=load_metrics(row.metrics_json),
                policy_sha256=row.policy_sha256,
                created_at=row.created_at,
            )
            for row in connection.execute(statement)
        ]
