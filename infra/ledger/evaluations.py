"""Evaluations in the ledger: asked for by pinned requests, reported once per policy version and suite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select, update

from infra.ledger.database import Database, clock, reads, writes_durably
from infra.ledger.history import pinned, trajectory_row
from infra.ledger.records import EvaluationRecord, Notable, TrajectoryRow, TrajectoryState
from infra.ledger.transitions import dump_metrics, insert_new, load_metrics
from infra.models import Evaluation, EvaluationOrder, Request, TrajectoryEntry


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
        settings: Mapping[str, Any] | None = None,
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
            "settings_json": json.dumps(settings or {}, sort_keys=True),
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
    def prompts_evaluated(self, connection: Connection, run_id: str, version: int) -> int:
        """How many different prompts were asked for in the evaluation of a version."""
        asked = pinned(run_id, version).with_only_columns(func.count(Request.prompt_key.distinct()))
        return connection.execute(asked).scalar_one()

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
                settings=json.loads(row.settings_json or "{}"),
            )
            for row in connection.execute(statement)
        ]

    @reads
    def notable_rollouts(self, connection: Connection, run_id: str, version: int, k: int) -> Notable:
        """The ``k`` best, the ``k`` worst and a typical sampled rollout of a version's evaluation."""
        entry = TrajectoryEntry
        sampled = (
            entry.run_id == run_id,
            entry.request_number.in_(pinned(run_id, version)),
            entry.state == TrajectoryState.KEPT,
            entry.segment == 0,
            ~entry.greedy,
        )

        def first(limit: int, *order: Any) -> list[TrajectoryRow]:
            statement = select(entry.__table__).where(*sampled).order_by(*order, entry.request_number).limit(limit)
            return [trajectory_row(row) for row in connection.execute(statement)]

        best = first(k, entry.score.desc(), entry.num_action_tokens.desc())
        taken = {row.trajectory_id for row in best}
        # Nearly all may be among the best: look at twice as many.
        worst = [row for row in first(2 * k, entry.score, entry.num_action_tokens) if row.trajectory_id not in taken]
        mean = select(func.avg(entry.score), func.avg(entry.num_action_tokens)).where(*sampled)
        score, length = connection.execute(mean).one()
        if score is None:
            return Notable((), (), None)
        middle = first(1, func.abs(entry.score - float(score)), func.abs(entry.num_action_tokens - float(length)))
        return Notable(tuple(best), tuple(worst[:k]), middle[0])
