"""What surrounds a full run goes away, for a while or for good; `make chaos` only: a minute or more each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest
from outages import PrefectServer, free_port
from short_run import FASTEST, Home, once_each, points_per_step

from infra.ledger import RunStatus
from infra.tracking import Tracker
from sao_core.config import parse_config

UPDATES = 12
OUT_WITHIN_S = 120.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
]


def check_that_it_gets_out(home: Home, process: subprocess.Popen[str], run_id: str) -> None:
    """The run completes, and no process of it is left two minutes after the work was done."""
    stdout, stderr = process.communicate(timeout=600)
    left = time.time()
    assert process.returncode == 0, stdout + stderr
    assert "Traceback" not in stdout + stderr
    ledger = home.ledger()
    run = ledger.run(run_id)
    assert run.status is RunStatus.COMPLETED
    assert run.step == UPDATES
    done_at = max(ledger.updates_since(run_id, 0)[-1].committed_at, *(e.created_at for e in ledger.evaluations(run_id)))
    assert left - done_at < OUT_WITHIN_S
    assert not [worker.pid for worker in ledger.workers(run_id) if Path(f"/proc/{worker.pid}").exists()]


def test_a_prefect_server_that_dies_for_good_does_not_hold_the_run(tmp_path: Path):
    server = PrefectServer(tmp_path / "prefect")
    server.start()
    home = Home(tmp_path, {"PREFECT_API_URL": server.api})
    process = home.train(*FASTEST, f"learner.updates={UPDATES}", "rollout.workers=1")
    run_id = home.wait_for_step(process, 3)
    server.kill()
    check_that_it_gets_out(home, process, run_id)


def test_the_server_that_sao_train_starts_may_die_too(tmp_path: Path):
    home = Home(tmp_path)
    process = home.train(*FASTEST, f"learner.updates={UPDATES}", "rollout.workers=1")
    run_id = home.wait_for_step(process, 3)
    keeper = json.loads((home.settings.home / "services" / "prefect.json").read_text())["keeper_pid"]
    for server in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
        os.killpg(int(server), signal.SIGKILL)
    check_that_it_gets_out(home, process, run_id)


def test_an_mlflow_server_that_comes_late_gets_everything_once(tmp_path: Path, prefect_api: str):
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    home = Home(tmp_path, {"PREFECT_API_URL": prefect_api, "MLFLOW_TRACKING_URI": uri})
    process = home.train(*FASTEST, f"learner.updates={UPDATES}", "rollout.workers=1")
    run_id = home.wait_for_step(process, 2)
    store = ("--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", "--workers", "1")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), *store]
    with open(tmp_path / "mlflow.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        check_that_it_gets_out(home, process, run_id)
        ledger = home.ledger()
        run = ledger.run(run_id)
        deadline = time.monotonic() + 120
        while not Tracker.sync(ledger, run_id, home.settings, parse_config(run.config)):
            assert time.monotonic() < deadline, (tmp_path / "mlflow.log").read_text()
        sent = mlflow.MlflowClient(uri).get_run(ledger.run(run_id).mlflow_run_id)
        assert sent.info.status == "FINISHED"
        assert points_per_step(uri, sent.info.run_id) == once_each(UPDATES)
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def test_a_full_disk_ends_the_run_with_one_line_and_room_lets_it_go_on(tmp_path: Path, prefect_api: str):
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here: a small disk cannot be mounted")
    script = Path(__file__).with_name("full_disk.py")
    disk = tmp_path / "disk"
    disk.mkdir()
    path = os.pathsep.join(map(str, (script.parents[2], script.parents[1])))
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, str(script), str(disk), prefect_api],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    full, resumed = report["full"], report["resumed"]
    assert full["exit"] == 1, full
    assert re.search(r"failed: .*(full|No space left)", full["stdout"])
    assert f"sao train --resume {report['run_id']}" in full["stdout"]
    assert "Traceback" not in full["stdout"] + full["stderr"]
    assert resumed["exit"] == 0, resumed
    assert report["step"] == UPDATES
    assert report["violations"] == []
