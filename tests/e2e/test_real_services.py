"""Postgres and S3 instead of SQLite and a folder: the usual variables are all that a run needs."""

from __future__ import annotations

import secrets
import signal
import subprocess

import psutil
from short_run import FASTEST, FASTEST_BATCH, Home, once_each, points_per_step

from infra.ledger import RunStatus, TrajectoryState
from infra.objects import ObjectStore
from infra.verify import verify
from sao_core.trajectory import Purpose


def kill_worker(process: subprocess.Popen[str], name: str) -> None:
    """SIGKILL a rollout worker of a run."""
    [worker] = [child for child in psutil.Process(process.pid).children() if name in child.cmdline()]
    worker.kill()


def test_a_run_on_postgres_and_s3_outlives_ctrl_c_and_a_killed_worker(
    tmp_path, new_postgres_database, s3_endpoint, prefect_api
):
    """Resumed with fewer updates and another learning rate, which is told and written down."""
    variables = {
        "SAO_DATABASE_URL": new_postgres_database(),
        "SAO_OBJECT_STORE": f"s3://sao/{secrets.token_hex(4)}",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    home = Home(tmp_path, {**variables, "PREFECT_API_URL": prefect_api})
    process = home.train(*FASTEST, "learner.updates=40", "rollout.workers=2")
    run_id = home.wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stdout + stderr
    assert "Traceback" not in stdout + stderr
    ledger = home.ledger()
    run, checkpoint = ledger.run(run_id), ledger.latest_checkpoint(run_id)
    assert run.status is RunStatus.CANCELLED
    assert checkpoint is not None
    assert checkpoint.step == run.step
    assert f"stopped with the checkpoint of step {run.step}. Continue with: sao train --resume {run_id}" in stdout

    updates = run.step + 6
    changed = ("--set", f"learner.updates={updates}", "--set", "policy.lr=5e-4")
    process = home.start("train", "--resume", run_id, *changed)
    home.wait_for_step(process, run.step + 1)
    kill_worker(process, "rollout-1")
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stdout + stderr
    assert f"changed: learner.updates: 40 → {updates}" in stdout
    assert [change.setting for change in ledger.config_changes(run_id)] == ["learner.updates", "policy.lr"]
    run = ledger.run(run_id)
    assert run.status is RunStatus.COMPLETED
    assert {worker.worker.rsplit("-", 1)[0] for worker in ledger.workers(run_id)} >= {"rollout-0", "rollout-1"}
    made = ledger.updates_since(run_id, 0)
    assert [update.step for update in made] == list(range(1, updates + 1))
    assert made[-1].metrics["policy/lr"] == 5e-4
    found = verify(ledger, ObjectStore.from_settings(home.settings), run_id, tracking_uri=home.settings.tracking_uri)
    assert found.ok, found.violations
    trained = [row for row in ledger.trajectories(run_id, Purpose.TRAIN) if row.state is TrajectoryState.TRAINED]
    assert len({row.request_number for row in trained}) == len(trained) == FASTEST_BATCH * updates
    assert points_per_step(home.settings.tracking_uri, run.mlflow_run_id) == once_each(updates)
    assert not (home.settings.home / "ledger.db").exists()
    assert not (home.settings.home / "objects").exists()
