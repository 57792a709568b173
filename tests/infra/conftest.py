"""Real places to test against: SQLite + folder, and Postgres + the S3 protocol."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from infra_fixtures import Places

from infra.ledger import Ledger
from infra.objects import ObjectStore


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty ledger file, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "ledger.db"
    Ledger(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def new_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty database of MLflow, to be copied: making one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def postgres_database(new_postgres_database: Callable[[], str]) -> str:
    """A database of one file's tests: what looks at all runs, as upkeep does, is not to meet those of other files."""
    return new_postgres_database()


@pytest.fixture(params=["sqlite+folder", "postgres+s3"])
def places(request: pytest.FixtureRequest, tmp_path: Path, migrated_sqlite: Path) -> Places:
    """Where a test keeps its things, of both kinds in turn."""
    if request.param == "sqlite+folder":
        shutil.copy(migrated_sqlite, tmp_path / "ledger.db")
        return Places(f"sqlite:///{tmp_path / 'ledger.db'}", str(tmp_path / "objects"), None, tmp_path / "cache")
    postgres, endpoint = request.getfixturevalue("postgres_database"), request.getfixturevalue("s3_endpoint")
    return Places(postgres, f"s3://sao/{secrets.token_hex(4)}", endpoint, tmp_path / "cache")


@pytest.fixture
def ledger(places: Places) -> Iterator[Ledger]:
    ledger = Ledger(places.database_url, patience_s=5.0)
    yield ledger
    ledger.close()


@pytest.fixture
def objects(places: Places) -> ObjectStore:
    return ObjectStore(places.object_store, endpoint_url=places.endpoint_url, patience_s=5.0)


@pytest.fixture
def run(ledger: Ledger) -> str:
    """A started run with its initial policy (version 0); a request has two attempts."""
    from infra_fixtures import start_run

    return start_run(ledger)
