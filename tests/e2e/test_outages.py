"""A run outlives its observers, ends well when it is told to, and goes on under the same flow run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from outages import PrefectServer, Silent, flow_run_state
from short_run import FASTEST, FASTEST_BATCH, Home, once_each, points_per_step

from infra.ledger import RunStatus, TrajectoryState
from infra.tracking import CLOSE_DEADLINE_S, Tracker
from sao_core.config import parse_config
from sao_core.trajectory import Purpose

UPDATES = 12


@pytest.fixture(scope="module")
def cancelled(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> tuple[Home, str, float]:
    """A run that got a SIGTERM after its third step, where it was, and how long it took to leave."""
    home = Home(tmp_path_factory.mktemp("cancelled"), {"PREFECT_API_URL": prefect_api})
    process = home.train(*FASTEST, f"learner.updates={UPDATES}", "rollout.workers=1")
    run_id = home.wait_for_step(process, 3)
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    stdout, stderr = process.communicate(timeout=60)
    took_s = time.monotonic() - told
    assert process.returncode == 1, stderr
    assert f"Continue with: sao train --resume {run_id}" in stdout
    assert "Traceback" not in stdout + stderr
    return home, run_id, took_s


@pytest.mark.long
def test_sigterm_leaves_a_checkpoint_within_30_s_and_the_right_state_everywhere(cancelled, prefect_api: str):
    home, run_id, took_s = cancelled
    ledger = home.ledger()
    run, checkpoint = ledger.run(run_id), ledger.latest_checkpoint(run_id)
    assert took_s < 30
    assert run.status is RunStatus.CANCELLED
    assert checkpoint is not None
    assert checkpoint.step == run.step
    assert {worker.state for worker in ledger.workers(run_id)} == {"stopped"}
    assert flow_run_state(prefect_api, run.prefect_flow_run_id) == "CANCELLED"
    assert mlflow.MlflowClient(home.settings.tracking_uri).get_run(run.mlflow_run_id).info.status == "KILLED"


@pytest.mark.long
def test_a_retry_in_the_ui_goes_on_from_the_checkpoint_under_the_same_flow_run(cancelled, prefect_api: str):
    home, run_id, _ = cancelled
    ledger = home.ledger()
    before = ledger.run(run_id)
    script = Path(__file__).with_name("retry_flow.py")
    done = home.python(str(script), str(before.prefect_flow_run_id))
    assert done.stdout.splitlines()[-1:] == ["COMPLETED"], done.stdout + done.stderr
    run = ledger.run(run_id)
    assert run.status is RunStatus.COMPLETED
    assert run.prefect_flow_run_id == before.prefect_flow_run_id
    assert flow_run_state(prefect_api, run.prefect_flow_run_id) == "COMPLETED"
    updates = ledger.updates_since(run_id, 0)
    assert [update.step for update in updates] == list(range(1, UPDATES + 1))
    assert [u.step for u in updates if u.committed_at < before.ended_at] == list(range(1, before.step + 1))
    trained = [row for row in ledger.trajectories(run_id, Purpose.TRAIN) if row.state is TrajectoryState.TRAINED]
    assert len({row.request_number for row in trained}) == len(trained) == FASTEST_BATCH * UPDATES
    assert points_per_step(home.settings.tracking_uri, run.mlflow_run_id) == once_each(UPDATES)


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path / "prefect")
    server.start()
    yield server
    server.kill()


@pytest.mark.long
def test_a_run_completes_while_prefect_is_away_and_mlflow_hangs(tmp_path: Path, prefect: PrefectServer):
    with Silent() as silent:
        home = Home(tmp_path, {"PREFECT_API_URL": prefect.api, "MLFLOW_TRACKING_URI": silent.url})
        process = home.train(*FASTEST, f"learner.updates={UPDATES}", "rollout.workers=1")
        run_id = home.wait_for_step(process, 2)
        prefect.kill()
        home.wait_for_step(process, 5)
        prefect.start(wait=False)
        home.wait_for_step(process, UPDATES)
        finished = time.monotonic()
        stdout, stderr = process.communicate(timeout=120)
        took_s = time.monotonic() - finished
    assert process.returncode == 0, stdout + stderr
    assert "Traceback" not in stdout + stderr
    assert took_s < 40 + CLOSE_DEADLINE_S
    ledger = home.ledger()
    run = ledger.run(run_id)
    assert run.status is RunStatus.COMPLETED
    assert prefect.flow_run_state(run.prefect_flow_run_id) == "COMPLETED"

    tracking = Home(tmp_path).settings
    for _ in range(2):
        assert Tracker.sync(ledger, run_id, tracking, parse_config(run.config))
    sent = mlflow.MlflowClient(tracking.tracking_uri).get_run(ledger.run(run_id).mlflow_run_id)
    assert sent.info.status == "FINISHED"
    assert points_per_step(tracking.tracking_uri, sent.info.run_id) == once_each(UPDATES)
