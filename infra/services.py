"""Local Prefect and MLflow servers: one of each per home, started by the first command that needs it.

    sao train ──┐ shared lock                 ┌─ prefect server (own session, own log)
    sao up ─────┴─▶ .sao/services/prefect.lock ◀─ keeper: stops it when nobody holds the lock

A server is shared by all commands of a home and outlives none of them: the lock of a process that ends, is terminated
or killed is dropped by the kernel. What a server prints goes to its log, never to the terminal.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from infra import keeper
from infra.settings import Settings

START_TIMEOUT_S = 120.0
"""Ready after 4 s (10 s in an empty home) on an idle machine; a shared one may need far more."""

_HOST = "127.0.0.1"
_HEALTH_TIMEOUT_S = 2.0
_LOG_TAIL_BYTES = 2000

_NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_PREFECT_SERVER = {
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_CLI_PROMPT": "false",
    # One transaction for the task-run events of two seconds instead of one each: half of the server's work.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "2",
}
_PREFECT_CLIENT = {
    # An API call against a dead server gives up after 62 s (it doubles per retry); a hung one is cut after 10 s each.
    "PREFECT_CLIENT_MAX_RETRIES": "5",
    "PREFECT_API_REQUEST_TIMEOUT": "10",
    # The shortest there is: what finds dead flow runs waits for a few missing heartbeats.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # The page of a flow run shows its log; a line for every finished task run would bury it.
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
}


class ServiceFailed(RuntimeError):
    """A local server did not come up; the message names its log and shows the end of it."""


@dataclass
class Service:
    """A local server in use by this process."""

    name: str
    url: str
    _lock: IO[bytes]

    def close(self) -> None:
        """Stop using it; the last user's leaving ends it within seconds. Safe to call twice."""
        self._lock.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefect_server(settings: Settings) -> Service:
    """The home's Prefect server, UI included, started if it does not run; ``url`` is that of its pages.

    Raises :class:`ServiceFailed`.
    """
    return _service(
        "prefect",
        settings,
        health="/api/health",
        command=lambda port: [sys.executable, "-m", "prefect", "server", "start", "--host", _HOST, "--port", str(port)],
        environment={"PREFECT_HOME": str(settings.prefect_home)},
        defaults=_PREFECT_SERVER,
        unset=("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL"),
    )


def mlflow_server(settings: Settings) -> Service:
    """The home's MLflow server over the tracking store of ``settings``; as :func:`prefect_server`.

    One worker and no job execution: 2 processes and 0.5 GB instead of 15 and 3.4 GB.
    """
    return _service(
        "mlflow",
        settings,
        health="/health",
        command=lambda port: [
            *(sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", settings.tracking_uri, "--artifacts-destination", str(settings.artifacts)),
        ],
        environment={},
        defaults={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        unset=("MLFLOW_TRACKING_URI",),
    )


def prefect_environment(settings: Settings, server: Service | None) -> dict[str, str]:
    """What to put into ``os.environ`` before ``import prefect`` in a process that runs flows.

    ``server``: the local one, or None where ``settings.prefect_api_url`` names another. What the user has set stays.
    """
    defaults = {**_NO_TELEMETRY, **_PREFECT_CLIENT}
    environment = {key: value for key, value in defaults.items() if key not in os.environ}
    if server is not None:
        environment["PREFECT_API_URL"] = f"{server.url}/api"
        environment["PREFECT_HOME"] = str(settings.prefect_home)
    return environment


def _service(
    name: str,
    settings: Settings,
    *,
    health: str,
    command: Callable[[int], list[str]],
    environment: Mapping[str, str],
    defaults: Mapping[str, str],
    unset: tuple[str, ...],
) -> Service:
    """``environment`` is set for the server, ``defaults`` where the user has not, ``unset`` is kept from it."""
    folder = settings.home / "services"
    folder.mkdir(parents=True, exist_ok=True)
    lock_file, port_file = folder / f"{name}.lock", folder / f"{name}.json"
    lock = open(lock_file, "ab")  # noqa: SIM115  held as long as the service is used
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # from here on no keeper ends the service; waits for one that is ending it
        with _one_at_a_time(folder / f"{name}.start"):
            port = _announced_port(port_file)
            if port is None or not _healthy(port, health):
                port = _free_port()
                log_file = settings.home / "logs" / f"{name}-server.log"
                log_file.parent.mkdir(parents=True, exist_ok=True)
                inherited = {key: value for key, value in os.environ.items() if key not in unset}
                own = {**_NO_TELEMETRY, **defaults, **inherited, **environment}
                with open(log_file, "ab") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-P", keeper.__file__, str(lock_file), str(port_file), *command(port)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=own,
                        start_new_session=True,  # a Ctrl-C in the terminal is not for it
                    )
                try:
                    _wait_until_healthy(name, process, port, health, log_file)
                except BaseException:
                    process.terminate()
                    raise
                _announce(port_file, port, process.pid)
        return Service(name, f"http://{_HOST}:{port}", lock)
    except BaseException:
        lock.close()
        raise


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _announce(port_file: Path, port: int, keeper_pid: int) -> None:
    draft = port_file.with_suffix(".draft")
    draft.write_text(json.dumps({"port": port, "keeper_pid": keeper_pid}))
    draft.replace(port_file)


def _announced_port(port_file: Path) -> int | None:
    with suppress(FileNotFoundError, ValueError, KeyError):
        return int(json.loads(port_file.read_text())["port"])
    return None


def _wait_until_healthy(name: str, process: subprocess.Popen[bytes], port: int, health: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _healthy(port, health):
        if process.poll() is not None:
            raise ServiceFailed(f"the local {name} server ended while starting; {_tail(log_file)}")
        if time.monotonic() > deadline:
            raise ServiceFailed(f"the local {name} server was not up after {START_TIMEOUT_S:g} s; {_tail(log_file)}")
        time.sleep(0.05)


def _healthy(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _tail(log_file: Path) -> str:
    text = log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"the end of {log_file}:\n{text}"
