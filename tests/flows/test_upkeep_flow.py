"""`sao verify`, `sao upkeep` and the upkeep flow, from outside: what they print, change and exit with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.ledger import Ledger, NewPolicy
from infra.manifest import put_folder
from infra.objects import ObjectStore
from infra.settings import Settings
from sao_core.config import TrainConfig

RUN = "tiny-1"
ORPHAN = f"runs/{RUN}/trajectories/w-0a/000001-aa.parquet"
DAY_S = 86400.0


class Home:
    """A folder with a completed run that has one policy, and an orphan of a day ago."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = Settings.from_environment({}, directory=folder)
        self.ledger = Ledger(self.places.database_url)
        self.objects = ObjectStore.from_settings(self.places)
        self.ledger.create_run(RUN, "tiny", "sao", TrainConfig().model_dump(mode="json"))
        self.ledger.begin_attempt(RUN)
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_text("weights")
        key = f"runs/{RUN}/policies/0-1"
        self.ledger.add_policy(RUN, NewPolicy(0, key, put_folder(self.objects, key, folder / "policy")), step=0)
        self.ledger.set_status(RUN, "completed")
        self.objects.put(ORPHAN, b"left behind")
        os.utime(self.folder / ".sao" / "objects" / ORPHAN, (0, 0))

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python here in an environment without anybody's settings."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SAO_", "PREFECT_", "MLFLOW_", "AWS_"))}
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=own | {"COLUMNS": "400"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def sao(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "flows.cli", *arguments, **environment)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_verify_says_that_a_run_is_whole_and_names_its_orphans(home: Home) -> None:
    done = home.sao("verify", RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RUN}: every invariant holds" in done.stdout
    assert f"1 objects to which nothing refers (sao upkeep removes them): {ORPHAN}" in done.stdout
    assert "mlflow-points skipped: the run is not in MLflow" in done.stdout
    found = json.loads(home.sao("verify", RUN, "--json").stdout)
    assert (found["ok"], found["violations"], found["orphans"]) == (True, [], [ORPHAN])
    assert found["checked"]["weights"] == 1


def test_verify_names_each_violation_and_exits_with_1(home: Home) -> None:
    key = f"runs/{RUN}/policies/0-1/model.safetensors"
    home.objects.put(key, b"scratched")
    done = home.sao("verify", RUN)
    assert done.returncode == 1
    assert f"weights: policy 0: {key} is damaged: its sha256 should be " in done.stdout
    assert f"{RUN}: 1 violations" in done.stdout
    again = home.sao("verify", RUN, "--json")
    assert again.returncode == 1
    (violation,) = json.loads(again.stdout)["violations"]
    assert (violation["rule"], violation["subject"]) == ("weights", "policy 0")


def test_verify_of_an_unknown_run_exits_with_2(home: Home) -> None:
    done = home.sao("verify", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no run nobody")


def test_upkeep_lists_first_and_then_removes(home: Home) -> None:
    listed = home.sao("upkeep", "--dry-run", "--json")
    assert listed.returncode == 0, listed.stderr
    report = json.loads(listed.stdout)
    assert (report["dry_run"], report["grace_s"], report["bytes"]) == (True, 3600.0, 11)
    (action,) = report["actions"]
    assert (action["kind"], action["subject"]) == ("orphan", ORPHAN)
    assert home.objects.exists(ORPHAN)
    assert "nothing to do" in home.sao("upkeep", "--grace", "9e9").stdout
    done = home.sao("upkeep")
    assert done.returncode == 0, done.stderr
    assert ORPHAN in done.stdout
    assert "1 done, 11 B freed" in done.stdout
    assert not home.objects.exists(ORPHAN)
    assert home.sao("upkeep").stdout.strip() == "nothing to do"
    assert home.sao("upkeep", "--grace", "-1").returncode == 2


def test_the_flow_does_the_same_and_sets_flow_runs_right(home: Home, prefect_api: str) -> None:
    """A server that was away when runs ended takes their flow runs for running, cancelling or crashed."""
    with httpx.Client(base_url=prefect_api, timeout=30.0) as server:
        flow_id = server.post("/flows/", json={"name": "train"}).json()["id"]

        def flow_run(name: str, state: str) -> str:
            body = {"flow_id": flow_id, "name": name, "state": {"type": state}}
            for _ in range(20):
                answer = server.post("/flow_runs/", json=body)
                if answer.status_code != 503:  # its database was busy; Prefect's own client asks again, too
                    break
                time.sleep(0.5)
            return str(answer.raise_for_status().json()["id"])

        def state(flow_run_id: str) -> dict[str, Any]:
            return dict(server.get(f"/flow_runs/{flow_run_id}").json()["state"])

        statuses = {"completed": "RUNNING", "cancelled": "CANCELLING", "failed": "CRASHED", "interrupted": "RUNNING"}
        ids = {status: flow_run(f"train {status}", left) for status, left in statuses.items()}
        for status, flow_run_id in ids.items():
            home.ledger.create_run(status, "tiny", "sao", {})
            home.ledger.set_run_links(status, prefect_flow_run_id=flow_run_id)
            home.ledger.set_status(status, status, "out of memory" if status == "failed" else "")
        alive = flow_run("train alive", "RUNNING")
        home.ledger.create_run("alive", "tiny", "sao", {})
        home.ledger.set_run_links("alive", prefect_flow_run_id=alive)
        with home.ledger.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE runs SET ended_at = ended_at - {DAY_S}")

        script = "import json; from flows.upkeep import upkeep; print(json.dumps(upkeep(dry_run={})))"
        expected = {"flow run": 4, "orphan": 1}
        for dry_run in (True, False):
            done = home.run("-c", script.format(dry_run), PREFECT_API_URL=prefect_api)
            assert done.returncode == 0, done.stdout + done.stderr
            kinds = [action["kind"] for action in json.loads(done.stdout.splitlines()[-1])["actions"]]
            assert {kind: kinds.count(kind) for kind in kinds} == expected
            if dry_run:
                assert [state(flow_run_id)["type"] for flow_run_id in ids.values()] == list(statuses.values())
                assert home.objects.exists(ORPHAN)
        after = {status: state(flow_run_id) for status, flow_run_id in ids.items()}
        assert {status: one["type"] for status, one in after.items()} == {
            "completed": "COMPLETED",
            "cancelled": "CANCELLED",
            "failed": "FAILED",
            "interrupted": "CRASHED",
        }
        assert after["failed"]["message"] == "out of memory. Continue with: sao train --resume failed"
        assert state(alive)["type"] == "RUNNING"
        assert not home.objects.exists(ORPHAN)
        assert json.loads(home.sao("upkeep", "--json", PREFECT_API_URL=prefect_api).stdout)["actions"] == []


def test_upkeep_goes_on_without_a_prefect_server(home: Home) -> None:
    home.ledger.set_run_links(RUN, prefect_flow_run_id="6f1c7f0e-0000-4000-8000-000000000000")
    with home.ledger.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE runs SET ended_at = ended_at - {DAY_S}")
    done = home.sao("upkeep", "--json", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 0, done.stderr
    assert [action["kind"] for action in json.loads(done.stdout)["actions"]] == ["orphan"]
