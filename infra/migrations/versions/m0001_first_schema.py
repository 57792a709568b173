"""The first schema: runs, requests, trajectories, updates, policies, checkpoints, evaluations, workers."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "evaluation_orders",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("reported", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_evaluation_orders")),
    )
    op.create_index(
        op.f("ix_evaluation_orders_run_id_reported_version"),
        "evaluation_orders",
        ["run_id", "reported", "version"],
        unique=False,
    )
    op.create_table(
        "evaluations",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("suite", sa.String(length=255), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.Column("policy_sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("run_id", "version", "suite", name=op.f("uq_evaluations_run_id_version_suite")),
    )
    op.create_table(
        "failed_attempts",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("request_number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("failed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "request_number", "attempt", name=op.f("pk_failed_attempts")),
    )
    op.create_index(
        op.f("ix_failed_attempts_run_id_failed_at"), "failed_attempts", ["run_id", "failed_at"], unique=False
    )
    op.create_table(
        "frontiers",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=255), nullable=False),
        sa.Column("prompts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "purpose", name=op.f("pk_frontiers")),
    )
    op.create_table(
        "policies",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_policies")),
    )
    op.create_index(
        op.f("ix_policies_run_id_removed_at_version"), "policies", ["run_id", "removed_at", "version"], unique=False
    )
    op.create_index(op.f("ix_policies_run_id_step"), "policies", ["run_id", "step"], unique=False)
    op.create_table(
        "requests",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("purpose", sa.String(length=255), nullable=False),
        sa.Column("prompt_key", sa.Text(), nullable=False),
        sa.Column("group_number", sa.Integer(), nullable=True),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("sampling_json", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("lease_worker", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_requests")),
    )
    op.create_index(
        op.f("ix_requests_run_id_group_number"),
        "requests",
        ["run_id", "group_number"],
        unique=False,
        postgresql_where=sa.text("group_number IS NOT NULL"),
    )
    op.create_index(
        op.f("ix_requests_run_id_policy_version_purpose_state"),
        "requests",
        ["run_id", "policy_version", "purpose", "state"],
        unique=False,
    )
    op.create_index(
        op.f("ix_requests_run_id_state_purpose_number"),
        "requests",
        ["run_id", "state", "purpose", "number"],
        unique=False,
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("algorithm", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("attempt_started_at", sa.Double(), nullable=True),
        sa.Column("next_request", sa.Integer(), nullable=False),
        sa.Column("tracked_step", sa.Integer(), nullable=False),
        sa.Column("tracked_evaluation", sa.Integer(), nullable=False),
        sa.Column("mlflow_run_id", sa.Text(), nullable=True),
        sa.Column("prefect_flow_run_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    op.create_index(op.f("ix_runs_created_at"), "runs", ["created_at"], unique=False)
    op.create_table(
        "stages",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("stage", sa.String(length=255), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "stage", name=op.f("pk_stages")),
    )
    op.create_table(
        "trajectories",
        sa.Column("trajectory_id", sa.String(length=255), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("request_number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("num_segments", sa.Integer(), nullable=False),
        sa.Column("purpose", sa.String(length=255), nullable=False),
        sa.Column("prompt_key", sa.Text(), nullable=False),
        sa.Column("group_number", sa.Integer(), nullable=True),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("difficulty", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("reject_reason", sa.Text(), nullable=True),
        sa.Column("claimed_step", sa.Integer(), nullable=True),
        sa.Column("trained_step", sa.Integer(), nullable=True),
        sa.Column("rewound", sa.Integer(), nullable=False),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("object_row", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("num_action_tokens", sa.Integer(), nullable=False),
        sa.Column("num_turns", sa.Integer(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=False),
        sa.Column("greedy", sa.Boolean(), nullable=False),
        sa.Column("version_min", sa.Integer(), nullable=False),
        sa.Column("version_max", sa.Integer(), nullable=False),
        sa.Column("recorded_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("trajectory_id", name=op.f("pk_trajectories")),
        sa.UniqueConstraint(
            "run_id",
            "request_number",
            "attempt",
            "segment",
            name=op.f("uq_trajectories_run_id_request_number_attempt_segment"),
        ),
    )
    op.create_index(
        op.f("ix_trajectories_run_id_group_number"),
        "trajectories",
        ["run_id", "group_number"],
        unique=False,
        postgresql_where=sa.text("group_number IS NOT NULL"),
    )
    op.create_index(
        op.f("ix_trajectories_run_id_prompt_key_trained_step"),
        "trajectories",
        ["run_id", "prompt_key", "trained_step"],
        unique=False,
    )
    op.create_index(op.f("ix_trajectories_run_id_recorded_at"), "trajectories", ["run_id", "recorded_at"], unique=False)
    op.create_index(
        op.f("ix_trajectories_run_id_state_purpose_recorded_at"),
        "trajectories",
        ["run_id", "state", "purpose", "recorded_at"],
        unique=False,
    )
    op.create_index(
        op.f("ix_trajectories_run_id_trained_step"), "trajectories", ["run_id", "trained_step"], unique=False
    )
    op.create_table(
        "updates",
        sa.Column("update_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("version_before", sa.Integer(), nullable=False),
        sa.Column("version_after", sa.Integer(), nullable=False),
        sa.Column("num_trajectories", sa.Integer(), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.Column("prompts_issued", sa.Integer(), nullable=False),
        sa.Column("checkpoint_key", sa.Text(), nullable=True),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("update_id", name=op.f("pk_updates")),
    )
    op.create_index(
        op.f("ix_updates_run_id_superseded_step"), "updates", ["run_id", "superseded", "step"], unique=False
    )
    op.create_index(
        "uq_updates_surviving_step",
        "updates",
        ["run_id", "step"],
        unique=True,
        sqlite_where=sa.text("NOT superseded"),
        postgresql_where=sa.text("NOT superseded"),
    )
    op.create_table(
        "workers",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("purposes", sa.Text(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "worker", name=op.f("pk_workers")),
    )
