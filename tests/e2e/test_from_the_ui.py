"""What people do in the Prefect UI does what it says: start, cancel, pause, resume, retry, schedule."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from installation import Installation, installed, wait_for
from safetensors.torch import load_file
from short_run import FASTEST, Home

from flows.recipes import load_config
from infra.ledger import PolicyRecord, RunStatus
from infra.tracking import open_client

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("from-the-ui")]
LONG_ENOUGH = (*FASTEST, "learner.updates=400", "evaluation.every=0")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(tmp_path_factory.mktemp("up")) as installation:
        yield installation


def verified(home: Home, run: str) -> None:
    done = home.sao("verify", run)
    assert done.returncode == 0, done.stdout


def same_weights(home: Home, one: PolicyRecord, other: PolicyRecord) -> bool:
    ours, theirs = (
        load_file(Path(home.settings.object_store, policy.object_key, "model.safetensors")) for policy in (one, other)
    )
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_started_from_its_form_explains_itself(up: Installation):
    flow_run = up.train(*FASTEST, "learner.updates=5")
    ended = up.wait(flow_run)
    run = up.run_of(flow_run)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    assert ended["name"] == run
    assert up.task_names(flow_run) >= {
        "prepare policy",
        "rollout worker 0",
        "evaluator",
        "update 1",
        "update 5",
        "report",
    }
    by_key = {artifact["key"] or artifact["type"]: artifact for artifact in up.artifacts(flow_run)}
    assert by_key["progress"]["data"] == 100.0
    assert "update 5 of 5" in by_key["progress"]["description"]
    assert "sampled, step 5" in by_key["evaluation"]["data"]
    assert f"{up.home.settings.object_store}/runs/{run}" in by_key["trajectories"]["data"]
    mlflow_run = up.home.ledger().run(run).mlflow_run_id
    assert mlflow_run
    assert mlflow_run in by_key["mlflow-run"]["data"]
    report = by_key["training-report"]["data"]
    assert "## A typical rollout" in report
    assert "## The worst" in report
    tags = open_client(up.home.settings.tracking_uri).get_run(mlflow_run).data.tags
    assert tags["prefect_flow_run_url"] == f"{up.prefect}/runs/flow-run/{flow_run}"
    verified(up.home, run)


def test_a_value_out_of_range_is_refused_before_the_start_with_its_name(up: Installation):
    refused = up.submit("train/tiny", {"config": {"policy": {"lr": -1}}})
    assert refused.status_code == 409
    assert "config.policy.lr" in refused.text
    assert "-1" in refused.text
    unknown = up.submit("train/tiny", {"config": {"policy": {"lrr": 1}}})
    assert unknown.status_code == 409
    assert "lrr" in unknown.text


def test_a_configuration_that_cannot_work_fails_with_advice_and_makes_nothing(up: Installation):
    before = len(up.home.ledger().runs())
    flow_run = up.start("train/tiny", {"config": {"rollout": {"top_p": 0.9}}})
    ended = up.wait(flow_run)
    assert ended["state"]["type"] == "FAILED"
    assert "rollout.top_p must be 1 for training" in ended["state"]["message"]
    assert len(up.home.ledger().runs()) == before


def test_a_cancelled_run_keeps_a_checkpoint_and_the_deployment_resume_goes_on(up: Installation):
    flow_run = up.train(*LONG_ENOUGH)
    run = up.run_of(flow_run, step=2)
    up.set_state(flow_run, type="CANCELLING", name="Cancelling")
    up.wait(flow_run, "CANCELLED", timeout_s=60)
    ledger = up.home.ledger()
    wait_for(lambda: ledger.run(run).status is RunStatus.CANCELLED, 30, lambda: str(ledger.run(run)))
    checkpoint = ledger.latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.step == ledger.last_step(run)

    resumed = up.start("resume/resume", {"run_id": run, "changes": [f"learner.updates={checkpoint.step + 3}"]})
    assert up.wait(resumed)["state"]["type"] == "COMPLETED"
    assert ledger.last_step(run) == checkpoint.step + 3
    verified(up.home, run)


def test_a_paused_run_leaves_its_process_and_goes_on_when_it_is_resumed(up: Installation):
    flow_run = up.train(*LONG_ENOUGH, "learner.updates=60")
    run = up.run_of(flow_run, step=2)
    timeout = (datetime.now(UTC) + timedelta(seconds=300)).isoformat()
    up.set_state(
        flow_run, type="PAUSED", name="Suspended", state_details={"pause_timeout": timeout, "pause_reschedule": True}
    )
    ledger = up.home.ledger()
    wait_for(lambda: ledger.run(run).status is RunStatus.CANCELLED, 60, lambda: str(ledger.run(run)))
    wait_for(lambda: not up.flow_processes(), 30, lambda: "the flow's process stayed")
    assert up.flow_run(flow_run)["state"]["name"] == "Suspended"
    at = ledger.last_step(run)
    assert at < 60

    up.call("POST", f"/flow_runs/{flow_run}/resume", {})
    assert up.wait(flow_run)["state"]["type"] == "COMPLETED"
    assert ledger.last_step(run) == 60
    assert len(ledger.runs()) == len({r.run_id for r in ledger.runs()})
    verified(up.home, run)


def test_a_killed_flow_is_crashed_and_retry_goes_on_with_the_same_run(up: Installation):
    flow_run = up.train(*LONG_ENOUGH, "learner.updates=12")
    run = up.run_of(flow_run, step=2)
    (process,) = up.flow_processes()
    os.kill(process.pid, signal.SIGKILL)
    up.wait(flow_run, "CRASHED", timeout_s=60)
    assert up.settled(flow_run)["type"] == "CRASHED"  # its runner and its worker both say so

    up.set_state(flow_run, type="SCHEDULED", name="AwaitingRetry")
    assert up.wait(flow_run, "COMPLETED")["name"] == run
    assert up.home.ledger().last_step(run) == 12
    verified(up.home, run)


def test_a_schedule_fires(up: Installation):
    upkeep = up.call("GET", "/deployments/name/upkeep/upkeep")
    anchor = datetime.now(UTC).isoformat()
    up.call(
        "POST",
        f"/deployments/{upkeep['id']}/schedules",
        [{"active": True, "schedule": {"interval": 20, "anchor_date": anchor}}],
    )

    def scheduled_and_done() -> bool:
        found = up.call(
            "POST",
            "/flow_runs/filter",
            {
                "deployments": {"id": {"any_": [upkeep["id"]]}},
                "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
            },
        )
        return any(run["auto_scheduled"] for run in found)

    wait_for(scheduled_and_done, 120, lambda: "no scheduled run completed")
    schedules = up.call("GET", f"/deployments/{upkeep['id']}/schedules")
    up.call("DELETE", f"/deployments/{upkeep['id']}/schedules/{schedules[0]['id']}")


def test_two_users_side_by_side_do_not_disturb_each_other(up: Installation):
    flow_run = up.train(*FASTEST, "learner.updates=10", "seed=1")
    terminal = up.home.train(*FASTEST, "learner.updates=10", "seed=2")
    _stdout, stderr = terminal.communicate(timeout=280)
    assert terminal.returncode == 0, stderr
    assert up.wait(flow_run)["state"]["type"] == "COMPLETED"
    ledger = up.home.ledger()
    ours, theirs = (record for record in ledger.runs()[:2])
    assert {ours.config["seed"], theirs.config["seed"]} == {1, 2}
    for record in (ours, theirs):
        assert record.status is RunStatus.COMPLETED
        verified(up.home, record.run_id)


def test_a_second_training_waits_for_the_first(up: Installation):
    first = up.train(*LONG_ENOUGH)
    second = up.train(*FASTEST, "learner.updates=2")
    up.run_of(first, step=1)
    assert up.flow_run(second)["state"]["type"] == "SCHEDULED"
    up.set_state(first, type="CANCELLING", name="Cancelling")
    assert up.wait(second)["state"]["type"] == "COMPLETED"


def test_extra_workers_join_a_run_and_leave_with_it(up: Installation):
    flow_run = up.train(*LONG_ENOUGH)
    run = up.run_of(flow_run, step=1)
    extra = up.start("rollout/rollout-workers", {"run_id": run, "workers": 1})
    ledger = up.home.ledger()
    wait_for(
        lambda: any(w.worker.startswith("extra-") and w.state != "starting" for w in ledger.workers(run)),
        90,
        lambda: str(ledger.workers(run)),
    )
    up.set_state(flow_run, type="CANCELLING", name="Cancelling")
    ended = up.wait(extra, timeout_s=90)
    assert ended["state"]["type"] == "COMPLETED"
    assert "is cancelled" in ended["state"]["message"]


def test_nightly_training_goes_on_from_the_promoted_model(up: Installation):
    parameters = {
        "config": load_config("tiny", (*FASTEST, "learner.updates=2", "recipe=nights")).model_dump(mode="json")
    }
    first = up.wait(up.start("adapt/nightly", parameters))
    assert first["state"]["type"] == "COMPLETED", first["state"]
    assert "nights version 1 (step 2" in first["state"]["message"]
    ledger = up.home.ledger()
    assert ledger.run(first["name"]).config["model"]["path"] == "tiny"

    second = up.wait(up.start("adapt/nightly", parameters))
    assert second["state"]["type"] == "COMPLETED", second["state"]
    assert ledger.run(second["name"]).config["model"]["path"] == "models:/nights@champion"
    assert "promoted" in second["state"]["message"] or "nights version 2" in second["state"]["message"]
    champion = ledger.newest_policy(first["name"])
    assert champion is not None
    assert same_weights(up.home, ledger.policy(second["name"], 0), champion)


def test_a_study_compares_its_variants_and_goes_on_where_it_was(up: Installation):
    parameters = {
        "config": load_config("tiny", (*FASTEST, "learner.updates=1")).model_dump(mode="json"),
        "name": "k-or-not",
        "variants": {"sao": [], "single": ["algorithm.name=sao-single-update"]},
        "seeds": [0],
    }
    flow_run = up.start("study/study", parameters)
    ended = up.wait(flow_run)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    ledger = up.home.ledger()
    assert {ledger.run(f"k-or-not-{name}-s0").status for name in ("sao", "single")} == {RunStatus.COMPLETED}
    (table,) = [artifact for artifact in up.artifacts(flow_run) if artifact["key"] == "study"]
    assert "single" in table["data"]
    again = up.wait(up.start("study/study", parameters), timeout_s=60)
    assert again["state"]["type"] == "COMPLETED"
    assert ledger.run("k-or-not-sao-s0").attempt == 1


def test_stopping_the_installation_leaves_every_run_resumable(tmp_path: Path):
    with installed(tmp_path) as up:
        flow_run = up.train(*LONG_ENOUGH)
        run = up.run_of(flow_run, step=2)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(90) == 0
        ledger = up.home.ledger()
        record = ledger.run(run)
        assert record.status is RunStatus.CANCELLED
        checkpoint = ledger.latest_checkpoint(run)
        assert checkpoint is not None
        assert checkpoint.step == record.step
        verified(up.home, run)
