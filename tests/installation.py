"""An installation as `sao up` makes it, and what people do with it in the Prefect UI, through the same API."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from short_run import Home

from flows.recipes import load_config
from infra.services import PREFECT, WORKER, processes, running

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Installation:
    """A running `sao up` and its Prefect API."""

    def __init__(self, home: Home, process: subprocess.Popen[str]) -> None:
        self.home = home
        self.process = process
        self.prefect = running(home.settings, PREFECT) or ""
        self.api = httpx.Client(base_url=f"{self.prefect}/api", timeout=30.0)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.api.request(method, path, json=body)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def submit(self, deployment: str, parameters: Mapping[str, Any]) -> httpx.Response:
        """What the form's Submit sends; `deployment` is `flow/name`."""
        found = self.call("GET", f"/deployments/name/{deployment}")
        return self.api.post(f"/deployments/{found['id']}/create_flow_run", json={"parameters": parameters})

    def start(self, deployment: str, parameters: Mapping[str, Any]) -> str:
        answer = wait_for(
            lambda: (found := self.submit(deployment, parameters)).status_code != 503 and found,
            60,
            lambda: "the Prefect server is too busy",
        )
        assert answer.is_success, answer.text
        return str(answer.json()["id"])

    def train(self, *settings: str) -> str:
        """Start the tiny recipe with these settings from its deployment; returns the flow run."""
        return self.start("train/tiny", {"config": load_config("tiny", settings).model_dump(mode="json")})

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/flow_runs/{flow_run}")
        return found

    def wait(self, flow_run: str, *states: str, timeout_s: float = 240) -> dict[str, Any]:
        """Wait until the flow run is in one of these states (default: ended); returns it."""
        wanted = states or ENDED
        return wait_for(
            lambda: (found := self.flow_run(flow_run))["state"]["type"] in wanted and found,
            timeout_s,
            lambda: f"{flow_run} is {self.flow_run(flow_run)['state']}",
        )

    def run_of(self, flow_run: str, step: int = 0, timeout_s: float = 300) -> str:
        """The training run that a flow run holds, once it has committed this step."""
        ledger = self.home.ledger()

        def there() -> str | None:
            run = ledger.run_of_flow_run(flow_run)
            return run if run is not None and ledger.last_step(run) >= step else None

        return wait_for(there, timeout_s, lambda: f"{flow_run}: {self.flow_run(flow_run)['state']}")

    def flow_processes(self) -> list[psutil.Process]:
        """The process of each flow run that goes on."""
        found = []
        for process in processes(self.home.settings, WORKER):
            with suppress(psutil.NoSuchProcess):
                if "prefect.engine" in process.cmdline():
                    found.append(process)
        return found

    def settled(self, flow_run: str, quiet_s: float = 8.0) -> dict[str, Any]:
        """Wait until nobody has changed the flow run's state for a while; a person takes that long to see it."""
        since, state = time.monotonic(), None
        while time.monotonic() - since < quiet_s:
            now = self.flow_run(flow_run)["state"]
            if state is None or now["id"] != state["id"]:
                since, state = time.monotonic(), now
            time.sleep(0.5)
        return dict(state or {})

    def set_state(self, flow_run: str, **state: Any) -> None:
        self.call("POST", f"/flow_runs/{flow_run}/set_state", {"state": state, "force": True})

    def artifacts(self, flow_run: str) -> list[dict[str, Any]]:
        """Oldest first."""
        found = self.call("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
        return sorted(found, key=lambda artifact: str(artifact["created"]))

    def task_names(self, flow_run: str) -> set[str]:
        found = self.call("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}, "limit": 200})
        return {task["name"] for task in found}


def wait_for(condition: Callable[[], Any], timeout_s: float, otherwise: Callable[[], str]) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.3)
    return value


@contextmanager
def installed(folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[Installation]:
    """`sao up` in a folder, on free ports, stopped by Ctrl-C at the end."""
    ports = {"SAO_PREFECT_PORT": str(free_port()), "SAO_MLFLOW_PORT": str(free_port())}
    home = Home(folder, {**ports, **(variables or {})})
    with open(folder / "up.out", "w+") as out:
        process = home.start("up", stdout=out)
        try:
            wait_for(
                lambda: "Ctrl-C stops" in (folder / "up.out").read_text() or process.poll() is not None,
                180,
                lambda: (folder / "up.out").read_text(),
            )
            assert process.poll() is None, (folder / "up.out").read_text() + (
                process.stderr.read() if process.stderr else ""
            )
            yield Installation(home, process)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGINT)
                process.wait(90)
