"""Parts of unfinished rollouts, names of checkpoints, settings changed on resume."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("name", sa.Text(), nullable=True))
    op.create_table(
        "config_changes",
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("setting", sa.String(length=255), nullable=False),
        sa.Column("old_json", sa.Text(), nullable=False),
        sa.Column("new_json", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", "setting", name=op.f("pk_config_changes")),
    )
    op.create_table(
        "rollout_parts",
        sa.Column("part_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=255), nullable=False),
        sa.Column("request_number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=255), nullable=False),
        sa.Column("restorable", sa.Boolean(), nullable=False),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("num_action_tokens", sa.Integer(), nullable=False),
        sa.Column("recorded_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("part_id", name=op.f("pk_rollout_parts")),
    )
    op.create_index(
        op.f("ix_rollout_parts_run_id_request_number"), "rollout_parts", ["run_id", "request_number"], unique=False
    )
    op.create_index(
        op.f("ix_rollout_parts_run_id_recorded_at"), "rollout_parts", ["run_id", "recorded_at"], unique=False
    )
