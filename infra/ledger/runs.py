"""Runs in the ledger: creation, attempts, status, links, and how far tracking got."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, case, func, literal, select, union_all, update

from infra.ledger.database import Database, clock, reads, writes, writes_durably
from infra.ledger.records import (
    ConfigChangeRecord,
    Progress,
    RequestState,
    RunRecord,
    RunStatus,
    TrajectoryState,
    UnknownRun,
)
from infra.ledger.transitions import dump_metrics, insert_new, load_metrics, require_attempt, settle_parts
from infra.models import (
    Checkpoint,
    ConfigChange,
    Evaluation,
    Policy,
    Request,
    RolloutPart,
    Run,
    Stage,
    TrajectoryEntry,
    Update,
)

Watermark = Literal["update", "evaluation"]


class RunLedger(Database):
    """What concerns a run as a whole."""

    @writes_durably
    def create_run(
        self, connection: Connection, run_id: str, recipe: str, algorithm: str, config: Mapping[str, Any]
    ) -> bool:
        """Write down a run before anything of it starts; False if it was there already (then nothing changes).

        ``config`` is the resolved `TrainConfig` as JSON values; ``rollout.max_attempts`` in it bounds attempts.
        """
        row = {
            "run_id": run_id,
            "recipe": recipe,
            "algorithm": algorithm,
            "status": RunStatus.RUNNING,
            "message": "",
            "config_json": json.dumps(config, sort_keys=True),
            "max_attempts": _max_attempts(config),
            "created_at": clock(),
            "attempt": 0,
            "next_request": 0,
            "tracked_step": -1,
            "tracked_evaluation": 0,
        }
        return insert_new(connection, Run, row)

    @writes_durably
    def begin_attempt(self, connection: Connection, run_id: str) -> int:
        """Start a run, or start it again: returns the number of this attempt, counted from 1.

        Call it once per start or resume, before any child process. Processes of earlier attempts are fenced off from
        here on, their leases go back to the queue without costing a request an attempt, and rollouts that a batch had
        claimed are ready again.
        """
        attempt = require_attempt(connection, run_id, None) + 1
        connection.execute(
            update(Run)
            .where(Run.run_id == run_id)
            .values(attempt=attempt, attempt_started_at=clock(), status=RunStatus.RUNNING, message="", ended_at=None)
        )
        give_back(connection, run_id)
        connection.execute(
            update(TrajectoryEntry)
            .where(TrajectoryEntry.run_id == run_id, TrajectoryEntry.state == TrajectoryState.CLAIMED)
            .values(state=TrajectoryState.READY, claimed_step=None)
        )
        return attempt

    @reads
    def require_attempt(self, connection: Connection, run_id: str, attempt: int | None) -> None:
        """Make sure that the run is still at ``attempt``, before files are written in its name.

        Raises:
            Fenced: the run has moved on to a later attempt.
        """
        require_attempt(connection, run_id, attempt, lock=False)

    @reads
    def run(self, connection: Connection, run_id: str) -> RunRecord:
        """One run.

        Raises:
            UnknownRun: there is none of that id.
        """
        row = connection.execute(_run_columns().where(Run.run_id == run_id)).one_or_none()
        if row is None:
            raise UnknownRun(f"there is no run {run_id} in {self.label}")
        return _run_record(row)

    @reads
    def runs(self, connection: Connection, limit: int | None = None) -> list[RunRecord]:
        """All runs, or the last ``limit``; newest first."""
        rows = connection.execute(_run_columns().order_by(Run.created_at.desc(), Run.run_id.desc()).limit(limit))
        return [_run_record(row) for row in rows]

    @reads
    def has_run(self, connection: Connection, run_id: str) -> bool:
        """Whether there is a run of that id."""
        return connection.execute(select(Run.run_id).where(Run.run_id == run_id)).first() is not None

    @reads
    def run_of_flow_run(self, connection: Connection, prefect_flow_run_id: str | None) -> str | None:
        """The run that this Prefect flow run last began or resumed, or None."""
        if prefect_flow_run_id is None:
            return None
        statement = select(Run.run_id).where(Run.prefect_flow_run_id == prefect_flow_run_id)
        return connection.execute(statement.order_by(Run.created_at.desc()).limit(1)).scalar_one_or_none()

    @writes_durably
    def set_stage_metrics(self, connection: Connection, run_id: str, stage: str, metrics: Mapping[str, float]) -> None:
        """Store what a finished stage before the update loop measured; done again, the new figures stand."""
        values = {"metrics_json": dump_metrics(metrics), "finished_at": clock()}
        if not insert_new(connection, Stage, {"run_id": run_id, "stage": stage, **values}):
            connection.execute(update(Stage).where(Stage.run_id == run_id, Stage.stage == stage).values(**values))

    @reads
    def stage_metrics(self, connection: Connection, run_id: str) -> dict[str, dict[str, float]]:
        """Stage → what it measured, in the order in which they finished."""
        statement = select(Stage.stage, Stage.metrics_json).where(Stage.run_id == run_id).order_by(Stage.finished_at)
        return {stage: load_metrics(metrics) for stage, metrics in connection.execute(statement)}

    @writes_durably
    def set_status(self, connection: Connection, run_id: str, status: RunStatus | str, message: str = "") -> None:
        """Say how the run stands, and why, for people."""
        status = RunStatus(status)
        ended = None if status is RunStatus.RUNNING else clock()
        _update_run(connection, run_id, status=status, message=message, ended_at=ended)

    @writes_durably
    def change_config(
        self,
        connection: Connection,
        run_id: str,
        config: Mapping[str, Any],
        changed: Mapping[str, tuple[Any, Any]],
        *,
        attempt: int,
    ) -> None:
        """Store the configuration that ``attempt`` goes on with, and which settings it changed (old, new).

        Raises:
            Fenced: the run has moved on to a later attempt.
        """
        require_attempt(connection, run_id, attempt)
        settings = {"config_json": json.dumps(config, sort_keys=True), "max_attempts": _max_attempts(config)}
        _update_run(connection, run_id, **settings)
        newest = select(func.max(Checkpoint.step)).where(Checkpoint.run_id == run_id, ~Checkpoint.superseded)
        step = connection.execute(newest).scalar_one() or 0
        for setting, (old, new) in changed.items():
            row = {
                "run_id": run_id,
                "attempt": attempt,
                "setting": setting,
                "old_json": json.dumps(old),
                "new_json": json.dumps(new),
                "step": step,
                "changed_at": clock(),
            }
            insert_new(connection, ConfigChange, row)

    @reads
    def config_changes(self, connection: Connection, run_id: str) -> list[ConfigChangeRecord]:
        """The settings that resumes changed, in order."""
        statement = select(ConfigChange.__table__).where(ConfigChange.run_id == run_id)
        rows = connection.execute(statement.order_by(ConfigChange.attempt, ConfigChange.setting))
        return [
            ConfigChangeRecord(
                row.attempt, row.step, row.setting, json.loads(row.old_json), json.loads(row.new_json), row.changed_at
            )
            for row in rows
        ]

    @writes
    def set_run_links(
        self,
        connection: Connection,
        run_id: str,
        mlflow_run_id: str | None = None,
        prefect_flow_run_id: str | None = None,
    ) -> None:
        """Store where the run is seen elsewhere; None leaves a link as it is."""
        links = {"mlflow_run_id": mlflow_run_id, "prefect_flow_run_id": prefect_flow_run_id}
        _update_run(connection, run_id, **{name: value for name, value in links.items() if value is not None})

    @reads
    def watermark(self, connection: Connection, run_id: str, kind: Watermark = "update") -> int:
        """Up to which step (−1: none) or evaluation number (0: none) tracking has sent everything."""
        column = Run.tracked_step if kind == "update" else Run.tracked_evaluation
        return connection.execute(select(column).where(Run.run_id == run_id)).scalar_one()

    @writes
    def set_watermark(self, connection: Connection, run_id: str, value: int, kind: Watermark = "update") -> None:
        """Move a watermark; it never moves back."""
        column = Run.tracked_step if kind == "update" else Run.tracked_evaluation
        moved = case((column > value, column), else_=value)
        connection.execute(update(Run).where(Run.run_id == run_id).values({column: moved}))

    @reads
    def progress(self, connection: Connection, run_id: str) -> Progress:
        """The newest sign that the run gets on; heartbeats are none, since a stuck worker sends them too."""
        newest = union_all(
            _newest("attempt started", Run.attempt_started_at, Run.run_id == run_id),
            _newest("rollout recorded", TrajectoryEntry.recorded_at, TrajectoryEntry.run_id == run_id),
            _newest("part recorded", RolloutPart.recorded_at, RolloutPart.run_id == run_id),
            _newest(
                "update committed",
                Update.committed_at,
                Update.run_id == run_id,
                ~Update.superseded,
                order=Update.step,
            ),
            _newest("policy published", Policy.published_at, Policy.run_id == run_id, order=Policy.version),
            _newest("checkpoint stored", Checkpoint.created_at, Checkpoint.run_id == run_id, order=Checkpoint.step),
            _newest("stage finished", Stage.finished_at, Stage.run_id == run_id),
            _newest("evaluation done", Evaluation.created_at, Evaluation.run_id == run_id, order=Evaluation.version),
        )
        now = connection.execute(select(clock())).scalar_one()
        signs = [(at, kind) for kind, at in connection.execute(newest) if at is not None]
        at, kind = max(signs, default=(now, "run created"))
        return Progress(at=at, kind=kind, idle_s=max(0.0, now - at))


def give_back(connection: Connection, run_id: str, *which: ColumnElement[bool]) -> int:
    """Return leases (all, or those for which ``which`` holds) to the queue without spending an attempt."""
    statement = update(Request).where(Request.run_id == run_id, Request.state == RequestState.LEASED, *which)
    values = {"state": RequestState.PENDING, "lease_worker": None, "lease_until": None}
    given_back = statement.values(attempts=Request.attempts - 1, **values).returning(Request.number)
    numbers = connection.execute(given_back).scalars().all()
    settle_parts(connection, run_id, numbers)
    return len(numbers)


def _newest(kind: str, time: Any, *where: Any, order: Any = None) -> Any:
    last = select(time).where(*where).order_by((time if order is None else order).desc()).limit(1)
    return select(literal(kind), last.scalar_subquery())


def _run_columns() -> Any:
    step = (
        select(func.max(Update.step))
        .where(Update.run_id == Run.run_id, ~Update.superseded)
        .correlate(Run)
        .scalar_subquery()
    )
    return select(*Run.__table__.c, step.label("step"))


def _run_record(row: Row[Any]) -> RunRecord:
    return RunRecord(
        run_id=row.run_id,
        recipe=row.recipe,
        algorithm=row.algorithm,
        status=RunStatus(row.status),
        config=json.loads(row.config_json),
        created_at=row.created_at,
        ended_at=row.ended_at,
        message=row.message,
        attempt=row.attempt,
        mlflow_run_id=row.mlflow_run_id,
        prefect_flow_run_id=row.prefect_flow_run_id,
        step=row.step or 0,
    )


def _update_run(connection: Connection, run_id: str, **values: Any) -> None:
    if values and not connection.execute(update(Run).where(Run.run_id == run_id).values(**values)).rowcount:
        raise UnknownRun(f"there is no run {run_id}")


def _max_attempts(config: Mapping[str, Any]) -> int:
    return int(config.get("rollout", {}).get("max_attempts", 3))
