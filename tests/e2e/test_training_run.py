"""What a run leaves behind, checked against itself: ledger ↔ objects ↔ weights ↔ MLflow, token by token."""

from __future__ import annotations

import hashlib

import mlflow
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from short_run import BATCH, UPDATES

from infra.ledger import Ledger, RequestState, TrajectoryState
from infra.objects import ObjectStore
from infra.trajectory_store import TrajectoryStore
from sao_core.models.policy import load_policy
from sao_core.trajectory import Purpose, validate_rollout


@pytest.fixture(scope="module")
def ledger(home, finished):
    return Ledger(home.settings.database_url)


@pytest.fixture(scope="module")
def store(home):
    return TrajectoryStore(ObjectStore(home.settings.object_store))


@pytest.fixture(scope="module")
def stored(ledger, store, finished):
    """Every trajectory of the run as it is stored, by id."""
    return {t.trajectory_id: t for rollout in store.read(ledger.trajectories(finished["run_id"])) for t in rollout}


def test_the_run_completes_and_says_where_everything_is(finished, home):
    assert finished["status"] == "completed"
    assert finished["step"] == UPDATES
    for part in (
        "held-out reward before and after",
        "difficulty 1",
        "trajectories",
        "MLflow run",
        "sao export",
        finished["run_id"],
    ):
        assert part in finished["stdout"]


def test_each_update_consumed_whole_batches_exactly_once(ledger, finished):
    rows = ledger.trajectories(finished["run_id"], Purpose.TRAIN)
    trained = [row for row in rows if row.state is TrajectoryState.TRAINED]
    assert sorted({row.trained_step for row in trained}) == list(range(1, UPDATES + 1))
    for step in range(1, UPDATES + 1):
        assert sum(row.trained_step == step for row in trained) == BATCH
    assert len({row.request_number for row in trained}) == UPDATES * BATCH


def test_every_request_ended_in_a_final_state(ledger, finished):
    final = {RequestState.DONE, RequestState.EXHAUSTED, RequestState.CANCELLED}
    for purpose in Purpose:
        assert set(ledger.request_states(finished["run_id"], purpose)) <= final


def test_ledger_rows_describe_the_stored_objects(ledger, stored, finished):
    rows = ledger.trajectories(finished["run_id"])
    assert len(rows) > UPDATES * BATCH
    for row in rows:
        t = stored[row.trajectory_id]
        assert (t.request_number, t.attempt, t.num_tokens, t.num_action_tokens, t.score) == (
            row.request_number,
            row.attempt,
            row.num_tokens,
            row.num_action_tokens,
            row.score,
        )
        validate_rollout([t])


def test_stored_logprobs_are_those_of_the_stored_weights_of_their_version(ledger, stored, finished, home):
    """Every action token, recomputed with the policy version that is recorded beside it."""
    run_id = finished["run_id"]
    records = list(stored.values())
    root = home.folder / ".sao" / "objects"
    versions = sorted({int(v) for t in records for v in np.unique(t.policy_versions[t.action_mask])})
    assert len(versions) >= 3, "several versions sampled"
    assert any(t.version_min < t.version_max for t in records), "some rollout went on across a swap of weights"
    worst, compared = 0.0, 0
    for version in versions:
        model = load_policy(root / ledger.policy(run_id, version).object_key)
        for t in records:
            of_version = t.action_mask & (t.policy_versions == version)
            if not of_version.any():
                continue
            ids = torch.tensor(t.token_ids, dtype=torch.long)[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits.float() / t.sampling.temperature
            logprobs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
            gaps = np.abs(logprobs - t.behavior_logprobs[1:])[of_version[1:]]
            worst, compared = max(worst, float(gaps.max())), compared + gaps.size
    assert compared == sum(t.num_action_tokens for t in records)
    assert worst <= 1e-4


def test_it_really_was_asynchronous(finished):
    assert finished["metrics"]["staleness/mean"] > 0
    assert finished["metrics"]["staleness/queue"] >= 0


def test_k_value_updates_per_batch_are_in_the_ledgers_metrics(ledger, finished):
    updates = ledger.updates_since(finished["run_id"], 0)
    assert [u.step for u in updates] == list(range(1, UPDATES + 1))
    assert all(u.metrics["value/updates"] == 2 for u in updates)


def test_the_policy_waits_for_the_critic_and_versions_are_gapless(ledger, finished):
    updates = ledger.updates_since(finished["run_id"], 0)
    assert updates[0].version_before == updates[0].version_after
    assert [u.version_after for u in updates[1:]] == list(range(1, UPDATES))


def test_evaluations_carry_the_hash_of_the_weights_they_used(ledger, finished, home):
    """An evaluation that served other weights than it says would be worth nothing."""
    root = home.folder / ".sao" / "objects"
    evaluations = ledger.evaluations(finished["run_id"])
    assert [e.step for e in evaluations] == [0, 3, 6]
    for evaluation in evaluations:
        policy = ledger.policy(finished["run_id"], evaluation.version)
        manifest = (root / policy.object_key / "manifest.json").read_bytes()
        assert evaluation.policy_sha256 == policy.sha256 == hashlib.sha256(manifest).hexdigest()
        rows = ledger.trajectories(finished["run_id"], Purpose.EVALUATE, version=evaluation.version)
        assert {row.version_min for row in rows} == {row.version_max for row in rows} == {evaluation.version}
        assert len(rows) == 32


def test_what_the_learner_saw_is_stored_per_token(stored, finished, home):
    run_id = finished["run_id"]
    table = pq.read_table(home.folder / ".sao" / "objects" / "runs" / run_id / "updates" / "4.parquet").to_pylist()
    assert len(table) == BATCH
    for row in table:
        t = stored[row["trajectory_id"]]
        kept, advantages = np.array(row["kept"]), np.array(row["advantages"])
        assert kept.shape == t.action_mask.shape
        assert not kept[~t.action_mask].any()
        assert (advantages[~t.action_mask] == 0).all()
        assert np.isfinite(advantages).all()


def test_mlflow_has_one_point_per_step(finished, home):
    client = mlflow.MlflowClient(tracking_uri=home.settings.tracking_uri)
    run = client.get_run(finished["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["policy.lr"] == "0.0003"
    assert run.data.tags["environment"] == "calculator"
    for name in ("reward/mean", "value/loss", "staleness/mean", "queue/ready"):
        points = client.get_metric_history(run.info.run_id, name)
        assert [p.step for p in points] == list(range(1, UPDATES + 1)), name
    evaluated = client.get_metric_history(run.info.run_id, "eval/calculator/reward_mean")
    assert [p.step for p in evaluated] == [0, 3, 6]


def test_show_says_where_the_time_goes(finished, home):
    shown = home.sao("show", finished["run_id"]).stdout
    for part in (
        "where the time goes",
        "orchestration",
        "ledger and storage",
        "waiting for rollouts",
    ):
        assert part in shown


def test_a_trajectory_is_shown_with_its_tokens_numbers(ledger, finished, home):
    row = ledger.trajectories(finished["run_id"], Purpose.TRAIN, step=4)[0]
    shown = home.json("trajectory", row.trajectory_id)
    assert shown["score"] == row.score
    actions = [token for token in shown["tokens"] if token["action"]]
    assert len(actions) == row.num_action_tokens
    assert all({"logprob", "advantage", "value", "version"} <= set(token) for token in actions)
    assert home.sao("trajectory", row.trajectory_id).returncode == 0


def test_export_gives_a_folder_that_trains_on(finished, home):
    done = home.sao("export", finished["run_id"], "exported")
    assert done.returncode == 0, done.stderr
    folder = home.folder / "exported"
    load_policy(folder)
    assert (folder / "critic").is_dir()
    again = home.sao("train", "tiny", "--set", f"model.path={folder}", "--dry-run")
    assert again.returncode == 0, again.stderr


def test_a_complete_run_that_is_resumed_says_how_to_train_on(finished, home):
    again = home.sao("train", "--resume", finished["run_id"])
    assert again.returncode == 2
    assert f"sao train --resume {finished['run_id']} --set learner.updates={2 * UPDATES}" in again.stderr
