"""Local Prefect and MLflow servers: one of each per home, started by the first command that needs it.

    sao train ──┐ shared lock                 ┌─ prefect server (own session, own log)
    sao up ─────┴─▶ .sao/services/prefect.lock ◀─ keeper: stops it when nobody holds the lock

`sao up` holds an MLflow server and a worker for flow runs in the same way.

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

import psutil

from infra import keeper
from infra.settings import Settings

PREFECT, MLFLOW, WORKER = "prefect", "mlflow", "worker"
WORK_POOL = "sao"
"""The Prefect work pool in which flow runs wait for a worker."""

START_TIMEOUT_S = 120.0
"""Ready after 4 s (10 s in an empty home) on an idle machine; a shared one may need far more."""

SERVER_STOP_S = 8.0
WORKER_STOP_S = 65.0
"""A flow run keeps a checkpoint when it is stopped, and tells Prefect and MLflow how it ended."""

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
    # Its pages ask the server that they came from, whatever its port, and through a tunnel too.
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
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
    # What the run says of itself belongs on its page; from threads without a run it goes to the log file only.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks,infra",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


class ServiceFailed(RuntimeError):
    """A local server did not come up; the message says why, or names its log and shows the end of it."""


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


def prefect_server(settings: Settings, port: int | None = None) -> Service:
    """The home's Prefect server, UI included, started if it does not run; ``url`` is that of its pages.

    ``port`` is where to start it; default: any that is free. Raises :class:`ServiceFailed`.
    """
    return _service(
        PREFECT,
        settings,
        port=port,
        health="/api/health",
        command=lambda port: [sys.executable, "-m", "prefect", "server", "start", "--host", _HOST, "--port", str(port)],
        environment=lambda _: {"PREFECT_HOME": str(settings.prefect_home)},
        defaults=_PREFECT_SERVER,
        unset=("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL"),
    )


def mlflow_server(settings: Settings, port: int | None = None) -> Service:
    """The home's MLflow server over the tracking store of ``settings``; as :func:`prefect_server`.

    One worker and no job execution: 2 processes and 0.5 GB instead of 15 and 3.4 GB.
    """
    return _service(
        MLFLOW,
        settings,
        port=port,
        health="/health",
        command=lambda port: [
            *(sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", settings.tracking_uri, "--artifacts-destination", str(settings.artifacts)),
        ],
        environment=lambda _: {},
        defaults={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        unset=("MLFLOW_TRACKING_URI",),
    )


def flow_worker(settings: Settings, prefect_url: str) -> Service:
    """The worker that starts the flow runs of the UI and of schedules here; it leaves after they have stopped."""
    return _service(
        WORKER,
        settings,
        port=None,
        health="/health",
        command=lambda port: [sys.executable, "-m", "flows.cli", "worker", "--health-port", str(port)],
        environment=lambda _: {
            **settings.as_environment(),
            "PREFECT_API_URL": f"{prefect_url}/api",
            "PREFECT_HOME": str(settings.prefect_home),
        },
        defaults=_PREFECT_CLIENT,
        unset=(),
        stop_grace_s=WORKER_STOP_S,
    )


def running(settings: Settings, name: str) -> str | None:
    """Where a service of this home answers, or None; starts nothing and waits for nothing."""
    announced = _announced(_folder(settings) / f"{name}.json")
    return f"http://{_HOST}:{announced.port}" if announced and psutil.pid_exists(announced.keeper_pid) else None


def processes(settings: Settings, name: str) -> list[psutil.Process]:
    """The keeper of a service and all that it started, itself first; empty if it does not run."""
    announced = _announced(_folder(settings) / f"{name}.json")
    try:
        kept = psutil.Process(announced.keeper_pid) if announced else None
        return [kept, *kept.children(recursive=True)] if kept else []
    except psutil.NoSuchProcess:
        return []


def require_free(name: str, port: int) -> None:
    """Raise :class:`ServiceFailed`, naming its holder, if a port of this machine is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ServiceFailed(
                f"port {port} for {name} is taken by {_listener(port) or error.strerror}; stop that, or choose "
                f"another: sao up --{name}-port {port + 1}"
            ) from None


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
    port: int | None,
    health: str,
    command: Callable[[int], list[str]],
    environment: Callable[[int], Mapping[str, str]],
    defaults: Mapping[str, str],
    unset: tuple[str, ...],
    stop_grace_s: float = SERVER_STOP_S,
) -> Service:
    """``environment`` is set for the server, ``defaults`` where the user has not, ``unset`` is kept from it."""
    folder = _folder(settings)
    folder.mkdir(parents=True, exist_ok=True)
    lock_file, port_file = folder / f"{name}.lock", folder / f"{name}.json"
    lock = open(lock_file, "ab")  # noqa: SIM115  held as long as the service is used
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # from here on no keeper ends the service; waits for one that is ending it
        with _one_at_a_time(folder / f"{name}.start"):
            announced = _announced(port_file)
            if announced is not None and _healthy(announced.port, health):
                port = announced.port
            else:
                if port is None:
                    port = _free_port()
                else:
                    require_free(name, port)
                log_file = settings.home / "logs" / f"{name}-server.log"
                log_file.parent.mkdir(parents=True, exist_ok=True)
                inherited = {key: value for key, value in os.environ.items() if key not in unset}
                own = {**_NO_TELEMETRY, **defaults, **inherited, **environment(port)}
                with open(log_file, "ab") as log:
                    process = subprocess.Popen(
                        [
                            *(sys.executable, "-P", keeper.__file__, str(lock_file), str(port_file)),
                            *(str(stop_grace_s), *command(port)),
                        ],
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


@dataclass(frozen=True)
class _Announced:
    port: int
    keeper_pid: int


def _announced(port_file: Path) -> _Announced | None:
    with suppress(FileNotFoundError, ValueError, TypeError):
        return _Announced(**json.loads(port_file.read_text()))
    return None


def _folder(settings: Settings) -> Path:
    return settings.home / "services"


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


def _listener(port: int) -> str | None:
    """The process that listens on a port, as far as this user may see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _tail(log_file: Path) -> str:
    text = log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"the end of {log_file}:\n{text}"
