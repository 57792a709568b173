"""Services that die, come back or never answer, for tests of what a run makes of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx


class PrefectServer:
    """A Prefect server of its own, which can be killed and started again on the same address and database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def api(self) -> str:
        """What `PREFECT_API_URL` names."""
        return f"http://127.0.0.1:{self._port}/api"

    def start(self, wait: bool = True) -> None:
        """Start it; with ``wait``, return once it answers."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)],
            env=environment | {"PREFECT_HOME": str(self._folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while wait and not self.healthy():
            assert self._process.poll() is None
            time.sleep(0.1)

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return httpx.get(f"{self.api}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """Have it gone at once, as after a power cut; safe to call twice."""
        if self._process is not None:
            process, self._process = self._process, None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def flow_run_state(self, flow_run_id: str | None) -> str:
        """The type of a flow run's state."""
        return flow_run_state(self.api, flow_run_id)


def flow_run_state(api: str, flow_run_id: str | None) -> str:
    """The type of a flow run's state on the server at ``api``."""
    return str(httpx.get(f"{api}/flow_runs/{flow_run_id}", timeout=10).json()["state"]["type"])


class Silent:
    """An address that takes every connection and never answers; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)  # the kernel accepts, nobody reads

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
