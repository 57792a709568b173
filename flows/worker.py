"""`sao worker`: a Prefect worker that does not kill what it started.

Prefect's own worker ends at SIGTERM by killing its flow runs within a second, before they can keep a checkpoint. So the
flow runs are asked first, and the worker leaves after them:

    SIGTERM ─▶ sao worker ─ SIGTERM ─▶ flow runs (checkpoint, Cancelled) … then ─ SIGTERM ─▶ prefect worker
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from infra.services import WORK_POOL, prefect_environment
from infra.settings import Settings
from sao_core.config import ConfigError

STOP_S = 50.0
"""How long flow runs may take to leave: 24 s for a checkpoint, and time for Prefect and MLflow to hear of it."""

WORKER_STOP_S = 8.0


def work(settings: Settings, queues: Sequence[str], at_once: int | None, health_port: int | None) -> int:
    """Run a worker until it ends or SIGTERM or SIGINT comes; returns the exit code: 0 if it was asked to leave.

    ``queues``: take the flow runs of these work queues of the pool; none: of all.
    ``health_port``: where on this machine `GET /health` tells whether it still polls; default: nowhere.

    Raises:
        ConfigError: no Prefect server is named.
    """
    if settings.prefect_api_url is None:
        raise ConfigError("a worker needs a Prefect server: set PREFECT_API_URL to its address, which ends in /api")
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    process = subprocess.Popen(
        _command(queues, at_once, health_port),
        env={**os.environ, **_environment(settings, health_port)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is for us
    )
    while process.poll() is None and not asked.wait(0.5):
        pass
    if process.poll() is None:
        _stop_flow_runs(process.pid)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(WORKER_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return 0 if asked.is_set() else code or 1


def _command(queues: Sequence[str], at_once: int | None, health_port: int | None) -> list[str]:
    return [
        *(sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process"),
        *("--name", f"{'+'.join(queues) or 'all'} on {socket.gethostname()}", "--install-policy", "never"),
        *(part for queue in queues for part in ("--work-queue", queue)),
        *(("--limit", str(at_once)) if at_once else ()),
        *(("--with-healthcheck",) if health_port else ()),
    ]


def _environment(settings: Settings, health_port: int | None) -> dict[str, str]:
    """The places in absolute terms, for flow runs start in a folder of their own."""
    defaults = {"PREFECT_WORKER_QUERY_SECONDS": "2"}  # a run asked for in the UI starts within seconds
    environment = {key: value for key, value in defaults.items() if key not in os.environ}
    if health_port:
        environment |= {"PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1", "PREFECT_WORKER_WEBSERVER_PORT": str(health_port)}
    return {**environment, **prefect_environment(settings, None), **settings.as_environment()}


def _stop_flow_runs(worker_pid: int) -> None:
    """Ask every flow run of a worker to leave, those that it starts meanwhile too, and wait for them."""
    deadline = time.monotonic() + STOP_S
    told: set[int] = set()
    with suppress(psutil.NoSuchProcess):
        worker = psutil.Process(worker_pid)
        while (runs := worker.children()) and time.monotonic() < deadline:
            for run in runs:
                if run.pid not in told:
                    told.add(run.pid)
                    with suppress(psutil.NoSuchProcess):
                        run.terminate()
            time.sleep(0.2)
