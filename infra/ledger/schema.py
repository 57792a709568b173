"""Bringing a database to this code's schema: Alembic migrations, run once, under a lock.

A process that finds the schema at `HEAD` does not import Alembic. A database that a newer version wrote is refused.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

import infra
from infra.ledger.database import Database, Mode
from infra.ledger.records import LedgerTooNew

HEAD = "0004"
"""The newest revision in `infra/migrations/versions`."""

MIGRATIONS = Path(infra.__file__).parent / "migrations"


def ensure_schema(database: Database) -> None:
    """Migrate ``database`` to `HEAD` if it is behind.

    Raises:
        LedgerRefused: this user may not create tables there.
        LedgerTooNew: its revision is unknown here.
    """
    if database.transact(_revision, Mode.READ) == HEAD:
        return
    try:
        with database.migration_lock() as connection:
            revision = _revision(connection)
            connection.rollback()
            if revision != HEAD:
                _upgrade(connection, revision, database.label)
    except DBAPIError as error:
        database.raise_if_refused(error)
        raise


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _upgrade(connection: Connection, revision: str | None, label: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise LedgerTooNew(
            f"the ledger {label} was written by a newer version of sao-pipeline (schema {revision}, this one knows "
            f"{HEAD}): upgrade sao-pipeline, or use another SAO_HOME or SAO_DATABASE_URL"
        )
    command.upgrade(config, HEAD)
