"""What an evaluation was made with; seconds and environment version of each rollout."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("evaluations", sa.Column("settings_json", sa.Text(), nullable=True))
    op.add_column("trajectories", sa.Column("duration_s", sa.Double(), nullable=True))
    op.add_column("trajectories", sa.Column("environment_version", sa.Text(), nullable=True))
