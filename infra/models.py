"""The ledger's tables as typed models. Columns here may be read by anyone; only `infra.ledger` writes.

Times are seconds since 1970 (UTC) by the database's clock. JSON is text, so that every reader has it.
Indexes serve the statements of `infra.ledger`: each touches a number of rows that does not grow with the run.
"""

from __future__ import annotations

from sqlalchemy import Double, Index, MetaData, PrimaryKeyConstraint, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Name = String(255)


class Base(DeclarativeBase):
    """All tables; constraints are named, so that migrations can speak of them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {float: Double, str: Text}


class Run(Base):
    """A training run, its counters and its watermarks."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    recipe: Mapped[str]
    algorithm: Mapped[str]
    status: Mapped[str]
    message: Mapped[str]
    config_json: Mapped[str]
    max_attempts: Mapped[int]
    created_at: Mapped[float] = mapped_column(index=True)
    ended_at: Mapped[float | None]
    attempt: Mapped[int]
    attempt_started_at: Mapped[float | None]
    next_request: Mapped[int]
    tracked_step: Mapped[int]
    tracked_evaluation: Mapped[int]
    mlflow_run_id: Mapped[str | None]
    prefect_flow_run_id: Mapped[str | None]


class Frontier(Base):
    """How many prompts of a purpose were issued (a group counts once), and whether these are all."""

    __tablename__ = "frontiers"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    purpose: Mapped[str] = mapped_column(Name, primary_key=True)
    prompts: Mapped[int]
    closed: Mapped[bool] = mapped_column(server_default=false())


class Request(Base):
    """A rollout that was asked for."""

    __tablename__ = "requests"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    purpose: Mapped[str] = mapped_column(Name)
    prompt_key: Mapped[str]
    group_number: Mapped[int | None]
    group_size: Mapped[int]
    sampling_json: Mapped[str]
    policy_version: Mapped[int | None]
    state: Mapped[str] = mapped_column(Name)
    attempts: Mapped[int]
    lease_worker: Mapped[str | None]
    lease_until: Mapped[float | None]
    issued_at: Mapped[float]

    __table_args__ = (
        Index(None, "run_id", "state", "purpose", "number"),
        Index(None, "run_id", "group_number", postgresql_where=text("group_number IS NOT NULL")),
        Index(None, "run_id", "policy_version", "purpose", "state"),
    )


class FailedAttempt(Base):
    """An attempt that gave nothing to train on, and why: nothing fails uncounted."""

    __tablename__ = "failed_attempts"

    run_id: Mapped[str] = mapped_column(Name)
    request_number: Mapped[int]
    attempt: Mapped[int]
    worker: Mapped[str | None]
    reason: Mapped[str]
    detail: Mapped[str]
    failed_at: Mapped[float]

    __table_args__ = (
        PrimaryKeyConstraint("run_id", "request_number", "attempt"),
        Index(None, "run_id", "failed_at"),
    )


class TrajectoryEntry(Base):
    """A stored trajectory: where its row is, and what became of it."""

    __tablename__ = "trajectories"

    trajectory_id: Mapped[str] = mapped_column(Name, primary_key=True)
    run_id: Mapped[str] = mapped_column(Name)
    request_number: Mapped[int]
    attempt: Mapped[int]
    segment: Mapped[int]
    num_segments: Mapped[int]
    purpose: Mapped[str] = mapped_column(Name)
    prompt_key: Mapped[str] = mapped_column(Text)
    group_number: Mapped[int | None]
    group_size: Mapped[int]
    difficulty: Mapped[str]
    state: Mapped[str] = mapped_column(Name)
    reject_reason: Mapped[str | None]
    claimed_step: Mapped[int | None]
    trained_step: Mapped[int | None]
    rewound: Mapped[int]
    object_key: Mapped[str]
    object_row: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    num_tokens: Mapped[int]
    num_action_tokens: Mapped[int]
    num_turns: Mapped[int]
    score: Mapped[float]
    outcome: Mapped[str]
    stop_reason: Mapped[str]
    greedy: Mapped[bool]
    version_min: Mapped[int]
    version_max: Mapped[int]
    recorded_at: Mapped[float]
    duration_s: Mapped[float | None]
    environment_version: Mapped[str | None]

    __table_args__ = (
        UniqueConstraint("run_id", "request_number", "attempt", "segment"),
        Index(None, "run_id", "state", "purpose", "recorded_at"),
        Index(None, "run_id", "recorded_at"),
        Index(None, "run_id", "trained_step"),
        Index(None, "run_id", "prompt_key", "trained_step"),
        Index(None, "run_id", "group_number", postgresql_where=text("group_number IS NOT NULL")),
    )


class RolloutPart(Base):
    """A stored piece of a rollout that is not finished: what its worker cannot take with it when it dies."""

    __tablename__ = "rollout_parts"

    part_id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(Name)
    request_number: Mapped[int]
    attempt: Mapped[int]
    part: Mapped[int]
    worker: Mapped[str]
    state: Mapped[str] = mapped_column(Name)
    restorable: Mapped[bool]
    object_key: Mapped[str]
    sha256: Mapped[str] = mapped_column(String(64))
    num_tokens: Mapped[int]
    num_action_tokens: Mapped[int]
    recorded_at: Mapped[float]

    __table_args__ = (Index(None, "run_id", "request_number"), Index(None, "run_id", "recorded_at"))


class Policy(Base):
    """A published policy version."""

    __tablename__ = "policies"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int]
    parent_version: Mapped[int | None]
    object_key: Mapped[str]
    sha256: Mapped[str] = mapped_column(String(64))
    superseded: Mapped[bool]
    attempt: Mapped[int]
    published_at: Mapped[float]
    removed_at: Mapped[float | None]

    __table_args__ = (Index(None, "run_id", "step"), Index(None, "run_id", "removed_at", "version"))


class Update(Base):
    """A committed step; a superseded one was undone by a rewind and may be followed by another of its number."""

    __tablename__ = "updates"

    update_id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(Name)
    step: Mapped[int]
    version_before: Mapped[int]
    version_after: Mapped[int]
    num_trajectories: Mapped[int]
    metrics_json: Mapped[str]
    prompts_issued: Mapped[int]
    checkpoint_key: Mapped[str | None]
    superseded: Mapped[bool]
    committed_at: Mapped[float]

    __table_args__ = (
        Index(
            "uq_updates_surviving_step",
            "run_id",
            "step",
            unique=True,
            sqlite_where=text("NOT superseded"),
            postgresql_where=text("NOT superseded"),
        ),
        Index(None, "run_id", "superseded", "step"),
    )


class Checkpoint(Base):
    """A complete checkpoint; step 0 is the one before the first update."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    object_key: Mapped[str]
    sha256: Mapped[str] = mapped_column(String(64))
    superseded: Mapped[bool]
    created_at: Mapped[float]
    name: Mapped[str | None]
    """A named one is never removed by retention."""


class ConfigChange(Base):
    """A setting that was changed when a run was resumed."""

    __tablename__ = "config_changes"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    setting: Mapped[str] = mapped_column(Name, primary_key=True)
    old_json: Mapped[str]
    new_json: Mapped[str]
    step: Mapped[int]
    changed_at: Mapped[float]


class Stage(Base):
    """A finished stage before the update loop (warm start, value pretraining) and what it measured."""

    __tablename__ = "stages"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    stage: Mapped[str] = mapped_column(Name, primary_key=True)
    metrics_json: Mapped[str]
    finished_at: Mapped[float]


class EvaluationOrder(Base):
    """A policy version whose evaluation was asked for."""

    __tablename__ = "evaluation_orders"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    reported: Mapped[bool]

    __table_args__ = (Index(None, "run_id", "reported", "version"),)


class Evaluation(Base):
    """The result of one suite on one policy version."""

    __tablename__ = "evaluations"

    number: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(Name)
    step: Mapped[int]
    version: Mapped[int]
    suite: Mapped[str] = mapped_column(Name)
    metrics_json: Mapped[str]
    policy_sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    settings_json: Mapped[str | None]

    __table_args__ = (UniqueConstraint("run_id", "version", "suite"),)


class Worker(Base):
    """A process that serves a run, by its last heartbeat."""

    __tablename__ = "workers"

    run_id: Mapped[str] = mapped_column(Name, primary_key=True)
    worker: Mapped[str] = mapped_column(Name, primary_key=True)
    host: Mapped[str]
    pid: Mapped[int]
    state: Mapped[str]
    version: Mapped[int | None]
    purposes: Mapped[str]
    heartbeat_at: Mapped[float]
    error: Mapped[str | None]
