"""Alembic's entry point: runs on the connection that `infra.ledger.schema` holds under its lock."""

from alembic import context

from infra.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations run through infra.ledger.schema.ensure_schema, which holds the lock")

context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
