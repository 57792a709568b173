"""`sao up`: everything of one machine with one command, one at a time, gone with it."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest
from installation import free_port, installed, wait_for
from short_run import Home

from infra.services import MLFLOW, PREFECT, WORKER, processes

MOST_MEMORY_BYTES = 1_000_000_000


@pytest.mark.long
def test_up_serves_everything_says_so_twice_and_leaves_nothing(tmp_path: Path):
    with installed(tmp_path) as up:
        home = up.home
        said = (tmp_path / "up.out").read_text()
        assert up.prefect in said
        assert "train/tiny" in said
        assert {d["name"] for d in up.call("POST", "/deployments/filter", {})} >= {
            "tiny",
            "resume",
            "nightly",
            "upkeep",
        }
        assert [a["name"] for a in up.call("POST", "/automations/filter", {})] == ["sao: flow runs that vanished"]

        second = home.sao("up")
        assert second.returncode == 0
        assert f"process {up.process.pid}" in second.stdout
        assert up.prefect in second.stdout

        status = json.loads(home.sao("status", "--json").stdout)
        assert status["supervisor_pid"] == up.process.pid
        services = {service["name"]: service for service in status["services"]}
        assert httpx.get(f"{services[MLFLOW]['url']}/health", timeout=10).text == "OK"
        supervisor = psutil.Process(up.process.pid).memory_full_info().pss
        assert sum(s["memory_bytes"] for s in services.values()) + supervisor < MOST_MEMORY_BYTES

        # A service that dies is started again, at the same address.
        keeper, mlflow, *_ = processes(home.settings, MLFLOW)
        mlflow.kill()
        keeper.wait(20)
        wait_for(lambda: _answers(f"{services[MLFLOW]['url']}/health"), 60, lambda: "MLflow did not come back")

        everything = [p for name in (PREFECT, MLFLOW, WORKER) for p in processes(home.settings, name)]
        down = home.sao("down")
        assert "stopped" in down.stdout
        assert up.process.wait(5) == 0
        _, alive = psutil.wait_procs(everything, timeout=20)
        assert not alive
        assert home.sao("down").stdout.startswith("sao up does not run")


def test_a_port_in_use_is_named_with_its_holder_and_the_way_out(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        home = Home(tmp_path, {"SAO_MLFLOW_PORT": str(port), "SAO_PREFECT_PORT": str(free_port())})
        done = home.sao("up")
    assert done.returncode == 1
    assert f"port {port} for mlflow is taken by process" in done.stderr
    assert "--mlflow-port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not processes(home.settings, PREFECT)


@pytest.mark.long
def test_what_up_started_is_gone_when_it_is_killed(tmp_path: Path):
    with installed(tmp_path) as up:
        everything = [p for name in (PREFECT, MLFLOW, WORKER) for p in processes(up.home.settings, name)]
        up.process.send_signal(signal.SIGKILL)
        up.process.wait()
        assert len(everything) >= 6
        _, alive = psutil.wait_procs(everything, timeout=30)
        assert not alive


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False
