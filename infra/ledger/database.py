"""The ledger's connection to SQLite (WAL) or Postgres: transactions, the database's clock, errors that pass.

Every public operation of the ledger is one transaction: `reads`, `writes` or `writes_durably`. A writer on SQLite takes
the write lock at its start (BEGIN IMMEDIATE) and in turn (a file lock beside the database), so it never finds the
database locked half-way. An operation whose connection broke is run again: each is idempotent, or fenced by what it
reads.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from enum import Enum, auto
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Double, Engine, create_engine, event, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from infra import refusals
from infra.ledger.records import LedgerError, LedgerRefused

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 60.0
"""How long a writer on SQLite waits for its turn."""


class Mode(Enum):
    """What a transaction is for."""

    READ = auto()
    WRITE = auto()
    """Atomic and safe from any kill of processes; a power cut may undo the last ones, in order."""
    DURABLE = auto()
    """On the disk when it returns, and everything before it too. (On Postgres every write is.)"""


P = ParamSpec("P")
R = TypeVar("R")


class clock(FunctionElement[float]):
    """The database's time, in seconds since 1970; it moves on within a transaction."""

    type = Double()
    inherit_cache = True


@compiles(clock, "sqlite")
def _sqlite_clock(_element: clock, _compiler: SQLCompiler, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock, "postgresql")
def _postgres_clock(_element: clock, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


class Database:
    """An engine whose transactions are run whole, and again when only the connection failed."""

    def __init__(self, url: str, *, patience_s: float = 60.0) -> None:
        """Open ``url``; an operation is retried for ``patience_s`` while the database cannot be reached."""
        self.url = ledger_url(url)
        self.patience_s = patience_s
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _postgres_engine(self.url)
        self._engines = {mode: self.engine.execution_options(mode=mode) for mode in Mode}
        self._met = False

    @property
    def is_sqlite(self) -> bool:
        """SQLite or Postgres."""
        return self.url.get_backend_name() == "sqlite"

    @property
    def label(self) -> str:
        """The URL without its password."""
        return self.label_of(self.url.render_as_string(hide_password=False))

    @staticmethod
    def label_of(url: str) -> str:
        """A database URL without its password, for people."""
        return refusals.without_password(url)

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    def now(self) -> float:
        """The database's clock."""
        return self.transact(lambda connection: connection.execute(select(clock())).scalar_one(), Mode.READ)

    def transact(self, work: Callable[[Connection], R], mode: Mode) -> R:
        """Run ``work`` in one transaction, again while the database is away (at most ``patience_s``).

        Raises:
            LedgerRefused: the database does not let us in.
            LedgerError: the database is full, or stayed away.
        """
        deadline = time.monotonic() + self.patience_s
        delay = 0.05
        while True:
            try:
                with self._turn(mode), self._engines[mode].begin() as connection:
                    self._met = True
                    return work(connection)
            except DBAPIError as error:
                if "disk is full" in str(error.orig) or getattr(error.orig, "sqlstate", None) == DISK_FULL:
                    raise LedgerError(
                        f"the disk of the ledger {self.label} is full: what is stored is intact; "
                        "make room and resume the run"
                    ) from error
                self.raise_if_refused(error)
                if not _passes(error):
                    raise
                reason = str(error.orig).strip().partition("\n")[0]
                if time.monotonic() + delay > deadline:
                    raise LedgerError(
                        f"the ledger {self.label} could not be reached for {self.patience_s:.0f} s ({reason}): is the "
                        "database running, and its address in SAO_DATABASE_URL right?"
                    ) from error
                level = logging.WARNING if self._met else logging.INFO  # who opens it is told by the error
                logger.log(level, "ledger %s: %s; trying again", self.label, reason)
                time.sleep(delay)
                delay = min(2 * delay, 2.0)

    def raise_if_refused(self, error: DBAPIError) -> None:
        """Raise :class:`LedgerRefused` for an error that waiting does not cure."""
        refused = refusals.of_database(error.orig or error, self.label)
        if refused is not None:
            raise LedgerRefused(refused) from error

    @property
    def _lock_file(self) -> Path:
        return Path(f"{self.url.database}.lock")

    def _turn(self, mode: Mode) -> AbstractContextManager[None]:
        """Wait for the writers before: SQLite alone lets them poll, and some starve for seconds."""
        return nullcontext() if mode is Mode.READ or not self.is_sqlite else _file_lock(self._lock_file)

    @contextmanager
    def migration_lock(self) -> Iterator[Connection]:
        """One process at a time: a file lock beside a SQLite file, an advisory lock on Postgres."""
        if self.is_sqlite:
            with _file_lock(self._lock_file):
                with closing(sqlite3.connect(str(self.url.database), timeout=BUSY_TIMEOUT_S)) as plain:
                    plain.execute("PRAGMA journal_mode=WAL")  # kept in the file; impossible within a transaction
                with self._engines[Mode.DURABLE].connect() as connection:
                    yield connection
        else:
            with self.engine.connect() as connection:
                connection.exec_driver_sql("SELECT pg_advisory_lock(hashtext('sao-ledger-migration'))")
                connection.commit()
                try:
                    yield connection
                finally:
                    connection.rollback()
                    connection.exec_driver_sql("SELECT pg_advisory_unlock(hashtext('sao-ledger-migration'))")
                    connection.commit()


S = TypeVar("S", bound=Database)


def _in(
    mode: Mode,
) -> Callable[[Callable[Concatenate[S, Connection, P], R]], Callable[Concatenate[S, P], R]]:
    """Make a method one transaction of a mode; callers leave its connection out."""

    def decorate(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return self.transact(lambda connection: method(self, connection, *args, **kwargs), mode)

        return run

    return decorate


def reads(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method one reading transaction; callers leave its connection out."""
    return _in(Mode.READ)(method)


def writes(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method one writing transaction; callers leave its connection out."""
    return _in(Mode.WRITE)(method)


def writes_durably(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method one transaction that is on the disk when it returns; callers leave its connection out."""
    return _in(Mode.DURABLE)(method)


def ledger_url(url: str) -> URL:
    """Parse a database URL; `postgres://` and `postgresql://` mean psycopg.

    Raises:
        LedgerError: neither SQLite in a file nor Postgres, or no URL.
    """
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1) if url.startswith("postgres://") else url)
    except (ValueError, ArgumentError):
        raise LedgerError(
            "SAO_DATABASE_URL is no URL of the form postgresql://user:password@host:port/database; write characters "
            "such as / : @ in the password as %2F %3A %40, or leave it out and set PGPASSWORD"
        ) from None  # the driver's own message quotes parts of the password
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise LedgerError(f"the ledger must be a SQLite file or Postgres: got {parsed.render_as_string()}")
    return parsed


def _sqlite_engine(url: URL) -> Engine:
    folder = Path(str(url.database)).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerRefused(f"the ledger {url} needs the folder {folder}: {error.strerror}; set SAO_HOME") from error
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver would begin transactions late, and only for some statements

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        mode = connection.get_execution_options().get("mode", Mode.READ)
        connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if mode is Mode.DURABLE else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN" if mode is Mode.READ else "BEGIN IMMEDIATE")

    return engine


def _postgres_engine(url: URL) -> Engine:
    return create_engine(url, connect_args={"connect_timeout": 10, "keepalives_idle": 30}, pool_size=4, max_overflow=4)


DISK_FULL = "53100"
"""SQLSTATE of a Postgres without space."""

PASSING_STATES = ("08", "57P", "40001", "40P01", "53300")
"""SQLSTATEs of Postgres that pass: connection lost, going down or coming up, serialization, deadlock, too many."""


def _passes(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return state.startswith(PASSING_STATES)
    message = str(error.orig)
    return any(part in message.lower() for part in ("database is locked", "connection", "resolve host"))


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    except PermissionError as error:
        raise LedgerRefused(f"this user may not write {path}: {error.strerror}; set SAO_HOME") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
