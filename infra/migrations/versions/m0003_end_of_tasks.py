"""Whether the tasks of a run have come to an end."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("frontiers", sa.Column("closed", sa.Boolean(), server_default=sa.false(), nullable=False))
