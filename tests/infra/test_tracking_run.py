"""A whole run in MLflow: models, traces, pages, charts, datasets; sent twice it is the same; a server takes it too."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient
from tracked_run import SUITE, TrackedRun, empty_home, no_charts

from infra.ledger.database import Mode
from infra.services import mlflow_server
from infra.settings import Settings
from infra.tracking import Tracker, send_now, system
from infra.tracking.registry import resolve_model, versions

REWARD = f"eval/{SUITE}/reward_mean"


@pytest.fixture
def settings(tmp_path: Path, new_mlflow: Path, migrated_sqlite: Path) -> Settings:
    return empty_home(tmp_path / "home", new_mlflow, migrated_sqlite)


@pytest.fixture
def quick() -> Iterator[None]:
    with no_charts():
        yield


class Sent:
    """A run in MLflow."""

    def __init__(self, made: TrackedRun) -> None:
        self.made, self.settings = made, made.settings
        self.send()

    def send(self) -> None:
        made = self.made
        send_now(made.ledger, made.run_id, self.settings, made.config)
        self.client = MlflowClient(self.settings.tracking_uri)
        self.run = self.client.get_run(made.ledger.run(made.run_id).mlflow_run_id)
        self.run_id, self.experiment_id = self.run.info.run_id, self.run.info.experiment_id

    @property
    def models(self) -> dict[str, Any]:
        return {model.name: model for model in self.client.search_logged_models([self.experiment_id])}

    def children(self) -> dict[str, Any]:
        found = self.client.search_runs([self.experiment_id], f"tags.`mlflow.parentRunId` = '{self.run_id}'")
        return {run.info.run_name: self.client.get_run(run.info.run_id) for run in found}

    def traces(self, run_id: str | None = None) -> dict[str, Any]:
        found = self.client.search_traces(locations=[self.experiment_id], run_id=run_id or self.run_id)
        return {f"{t.info.tags['step']}/{t.info.tags['rank']}": t for t in found}

    def file(self, path: str) -> bytes:
        return Path(self.client.download_artifacts(self.run_id, path)).read_bytes()


def complete_run(settings: Settings, run_id: str = "tiny-1", **sections: Any) -> TrackedRun:
    """Evaluated at steps 0, 2 and 4, with checkpoints of 2 and 4."""
    made = TrackedRun(settings, run_id, **({"tracking": {"traces": 1}} | sections))
    made.evaluate(0.0, 0.5, 0.25, greedy=1.0)
    made.steps(1, 2)
    made.checkpoint(2)
    made.evaluate(0.5, 0.75, 1.0)
    made.steps(3, 4)
    made.checkpoint(4)
    made.evaluate(1.0, 0.5, 0.75)
    made.complete()
    return made


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory, new_mlflow: Path, migrated_sqlite: Path) -> Sent:
    return Sent(complete_run(empty_home(tmp_path_factory.mktemp("run"), new_mlflow, migrated_sqlite)))


def test_a_checkpoint_is_a_model_with_the_score_of_its_policy(sent: Sent) -> None:
    assert set(sent.models) == {"step-2", "step-4"}
    for step, reward in ((2, 0.75), (4, 0.75)):
        model, policy = sent.models[f"step-{step}"], sent.made.ledger.policy("tiny-1", step)
        assert (model.status, model.model_type, model.source_run_id) == ("READY", "policy", sent.run_id)
        assert model.tags["sao.policy_sha256"] == policy.sha256
        assert model.tags["sao.uri"] == f"file://{sent.settings.object_store}/{policy.object_key}"
        assert Path(model.tags["sao.uri"].removeprefix("file://"), "model.safetensors").is_file()
        assert (model.params["step"], model.params["policy_version"]) == (str(step), str(step))
        scores = {metric.key: metric for metric in model.metrics}
        assert scores[REWARD].value == reward
        assert scores[REWARD].dataset_name == "calculator held out"
        evaluation = sent.children()[f"{SUITE} at step {step}"]
        assert scores[REWARD].run_id == evaluation.info.run_id
        assert [given.model_id for given in evaluation.inputs.model_inputs] == [model.model_id]
    outputs = {output.model_id: output.step for output in sent.run.outputs.model_outputs}
    assert outputs == {sent.models["step-2"].model_id: 2, sent.models["step-4"].model_id: 4}


def test_the_newest_checkpoint_of_a_completed_run_is_registered_and_kept(sent: Sent) -> None:
    (version,) = versions(sent.client, "tiny")
    assert (version.number, version.run_id, version.step) == (1, "tiny-1", 4)
    found = sent.client.get_model_version("tiny", "1")
    assert found.source == sent.models["step-4"].tags["sao.uri"]
    assert found.run_id == sent.run_id
    assert json.loads(sent.models["step-4"].tags["mlflow.modelVersions"]) == [{"name": "tiny", "version": 1}]
    names = {record.step: record.name for record in sent.made.ledger.checkpoints("tiny-1")}
    assert names == {2: None, 4: "registered-4"}
    assert resolve_model("models:/tiny/1", sent.settings) == found.source.removeprefix("file://")


def test_the_best_and_the_worst_rollouts_are_traces_with_their_reward(sent: Sent) -> None:
    traces = sent.traces()
    assert set(traces) == {f"{step}/{rank}" for step in (0, 2, 4) for rank in ("best-1", "worst-1")}
    rewards = {name: trace.info.assessments[0].feedback.value for name, trace in traces.items()}
    assert rewards == {"0/best-1": 0.5, "0/worst-1": 0.0, "2/best-1": 1.0, "2/worst-1": 0.5, "4/best-1": 1.0} | {
        "4/worst-1": 0.5
    }
    info = traces["4/best-1"].info
    assert (info.request_preview, info.response_preview) == ("find 1 plus 2", "answer: 1")
    assert (info.request_time, info.execution_duration) == (1_700_000_000_000, 3000)
    assert info.tags.items() >= {"policy_version": "4", "difficulty": "2", "outcome": "completed"}.items()
    assert sent.made.ledger.trajectory(info.tags["trajectory_id"]).score == 1.0
    (reward,) = info.assessments
    assert (reward.name, reward.source.source_id, reward.rationale) == ("reward", "calculator 1", "correct 1")
    evaluation = sent.children()[f"{SUITE} at step 4"]
    assert set(sent.traces(evaluation.info.run_id)) == {"4/best-1", "4/worst-1"}


def test_a_trace_is_the_conversation_in_order(sent: Sent) -> None:
    spans = sent.traces()["2/best-1"].data.spans
    assert [(span.name, span.span_type) for span in spans] == [
        ("rollout", "AGENT"),
        ("turn 1", "LLM"),
        ("tool 1", "TOOL"),
        ("turn 2", "LLM"),
    ]
    root, first, tool, second = spans
    assert root.parent_id is None
    assert {span.parent_id for span in spans[1:]} == {root.span_id}
    assert first.inputs == {"messages": [{"role": "user", "content": "find 1 plus 2"}]}
    assert first.outputs["choices"][0]["message"] == {"role": "assistant", "content": "calc: 1+2"}
    assert (tool.inputs, tool.outputs) == ({"action": "calc: 1+2"}, "3")
    assert second.inputs == {"messages": [{"role": "tool", "content": "3"}]}
    usage = second.attributes["mlflow.chat.tokenUsage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] > first.attributes["mlflow.chat.tokenUsage"]["total_tokens"]
    edges = [(span.start_time_ns - root.start_time_ns, span.end_time_ns - root.start_time_ns) for span in spans[1:]]
    assert [a for a, _ in edges] == [0, *[b for _, b in edges[:-1]]]
    assert edges[-1][1] == pytest.approx(3e9)
    assert edges[1][1] - edges[1][0] == pytest.approx(1e9)


def test_pages_and_charts_lie_in_the_object_store_and_mlflow_finds_them(sent: Sent) -> None:
    assert sent.run.info.artifact_uri.startswith(f"file://{sent.settings.object_store}/artifacts/tiny/")
    assert sent.file("charts/training.png").startswith(b"\x89PNG")
    assert b"tiny-1" in sent.file("charts/training.html")
    for step in (0, 2, 4):
        listed = [Path(found.path).name for found in sent.client.list_artifacts(sent.run_id, f"trajectories/{step}")]
        assert listed == ["best-1.html", "worst-1.html"]
    page, trace = sent.file("trajectories/4/best-1.html"), sent.traces()["4/best-1"]
    assert page.startswith(b"<!doctype html>")
    assert trace.info.tags["trajectory_id"].encode() in page


def test_runs_say_what_they_were_made_on_and_with_which_code(sent: Sent) -> None:
    given = {one.dataset.name: one for one in sent.run.inputs.dataset_inputs}
    contexts = {name: [tag.value for tag in one.tags] for name, one in given.items()}
    assert contexts == {"calculator": ["training"], "calculator held out": ["evaluation"]}
    profile = json.loads(given["calculator held out"].dataset.profile)
    assert profile.items() >= {"version": "1", "options": {}, "seed": 0, "held_out_prompts": 4}.items()
    assert given["calculator"].dataset.digest != given["calculator held out"].dataset.digest
    for child in sent.children().values():
        assert [one.dataset.name for one in child.inputs.dataset_inputs] == ["calculator held out"]
    assert sent.run.data.tags["sao.version"] == "0.1.0"
    assert {"mlflow.source.git.commit", "git.dirty"} <= set(sent.run.data.tags) or not Path(".git").exists()


def everything(database: Path) -> dict[str, int]:
    tables = ("runs", "metrics", "logged_models", "logged_model_metrics", "model_versions", "trace_info", "spans")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in (*tables, "assessments", "inputs", "datasets", "entity_associations")
        }


def test_what_is_sent_again_is_the_same(sent: Sent) -> None:
    database = sent.settings.home / "mlflow.db"
    before = everything(database)
    assert min(before.values()) > 0
    forget = "UPDATE runs SET tracked_step = -1, tracked_evaluation = 0"
    sent.made.ledger.transact(lambda connection: connection.exec_driver_sql(forget), Mode.WRITE)
    sent.send()
    assert everything(database) == before


@pytest.mark.usefixtures("quick")
def test_a_model_whose_files_retention_removed_is_deleted_and_one_with_its_policy_is_marked(settings: Settings) -> None:
    made = TrackedRun(settings, "tiny-1", tracking={"traces": 0})
    for step in (1, 2):
        made.steps(step)
        made.checkpoint(step)
    made.evaluate(0.5, 1.0)
    made.steps(3)
    sent = Sent(made)
    assert {name: model.tags["checkpoint"] for name, model in sent.models.items()} == {
        "step-1": "complete",
        "step-2": "complete",
    }
    for step in (4, 5):
        made.steps(step)
        made.checkpoint(step)
    made.steps(6, 7)
    made.maker.updates.close()
    assert made.ledger.policy("tiny-1", 1).removed_at is not None
    sent.send()
    states = {name: model.tags["checkpoint"] for name, model in sent.models.items()}
    assert set(states) == {"step-2", "step-4", "step-5"}  # of step 2 the policy stays, since it was evaluated
    assert (states["step-5"], states["step-2"]) == ("complete", "removed by retention; its policy is kept")
    sent.send()
    assert {name: model.tags["checkpoint"] for name, model in sent.models.items()} == states
    assert sent.client.search_registered_models() == []  # the run goes on


@pytest.mark.usefixtures("quick")
def test_a_model_that_somebody_deleted_holds_nothing_up(settings: Settings) -> None:
    made = TrackedRun(settings, "tiny-1", tracking={"traces": 0})
    tracker = Tracker(made.ledger, "tiny-1", settings, made.config)
    made.steps(1)
    made.checkpoint(1)
    tracker.start()
    client = MlflowClient(settings.tracking_uri)
    deadline = time.monotonic() + 60
    found: list[Any] = []
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        experiment = client.get_experiment_by_name("tiny")
        found = client.search_logged_models([experiment.experiment_id]) if experiment else []
    client.delete_logged_model(found[0].model_id)
    for step in (2, 3, 4):
        made.steps(step)
        made.checkpoint(step)
    made.complete()
    assert tracker.close("completed", 60)
    names = {model.name for model in client.search_logged_models([experiment.experiment_id])}
    assert names == {"step-3", "step-4"}


@pytest.mark.usefixtures("quick")
def test_an_evaluation_that_a_rewind_made_again_has_one_point_on_the_run(settings: Settings) -> None:
    made = TrackedRun(settings, "tiny-1", tracking={"traces": 0})
    made.steps(1)
    made.checkpoint(1)
    made.steps(2)
    made.evaluate(0.5, 1.0)
    sent = Sent(made)
    made.maker.close()
    made.attempt()
    assert made.maker.updates.latest_checkpoint() is not None
    made.steps(2)
    made.evaluate(0.0, 0.0)
    made.complete()
    for _ in range(2):
        sent.send()
        history = sent.client.get_metric_history(sent.run_id, REWARD)
        assert [(point.step, point.value) for point in history] == [(2, 0.75)]
    rewards = sorted(
        run.data.metrics[REWARD]
        for run in sent.client.search_runs([sent.experiment_id], f"tags.`mlflow.parentRunId` = '{sent.run_id}'")
    )
    assert rewards == [0.0, 0.75]


@pytest.mark.usefixtures("quick")
def test_runs_of_a_study_stand_below_one_run(settings: Settings) -> None:
    study = {"tracking": {"study": "it's lr", "traces": 0}}
    runs = [Sent(TrackedRun(settings, f"tiny-{seed}", seed=seed, **study)) for seed in (1, 2)]
    parents = {one.run.data.tags["mlflow.parentRunId"] for one in runs}
    assert len(parents) == 1
    parent = runs[0].client.get_run(parents.pop())
    assert (parent.info.run_name, parent.info.status, parent.data.tags["sao.study"]) == (
        "it's lr",
        "FINISHED",
        "it's lr",
    )


@pytest.mark.usefixtures("quick")
def test_the_machine_is_watched_while_the_run_lasts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SAMPLE_EVERY_S", 0.2)
    made = TrackedRun(settings, "tiny-1", tracking={"traces": 0})
    tracker = Tracker(made.ledger, "tiny-1", settings, made.config)
    tracker.start()
    client = MlflowClient(settings.tracking_uri)
    deadline = time.monotonic() + 20
    points: list[Any] = []
    while len(points) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        run_id = made.ledger.run("tiny-1").mlflow_run_id
        points = client.get_metric_history(run_id, "system/cpu_utilization_percentage") if run_id else []
    assert tracker.close("completed", 20)
    assert all(0 <= point.value <= 100 for point in points)
    run = client.get_run(run_id)
    assert {"system/system_memory_usage_megabytes", "system/disk_usage_percentage"} <= set(run.data.metrics)


@pytest.mark.usefixtures("quick")
def test_a_rollout_that_cannot_be_read_is_left_out(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    made = TrackedRun(settings, "tiny-1", tracking={"traces": 1})
    made.evaluate(0.0, 1.0)
    best = made.ledger.notable_rollouts("tiny-1", 0, 1).best[0]
    made.objects.put(best.object_key, b"damaged")
    with caplog.at_level(logging.WARNING, logger="infra.tracking"):
        sent = Sent(made)
    assert set(sent.traces()) == {"0/worst-1"}
    assert best.object_key in caplog.text
    assert made.ledger.watermark("tiny-1", "evaluation") > 0


@pytest.mark.usefixtures("quick")
def test_files_of_an_experiment_that_was_made_in_the_ui_go_where_its_server_looks(settings: Settings) -> None:
    MlflowClient(settings.tracking_uri).create_experiment("tiny", "mlflow-artifacts:/7")
    sent = Sent(TrackedRun(settings, "tiny-1", tracking={"traces": 0}))
    made = Path(settings.object_store, "artifacts/7", sent.run_id, "artifacts/charts/training.png")
    assert not made.exists()  # nothing to draw yet
    sent.made.steps(1)
    sent.made.evaluate(1.0)
    sent.send()
    assert made.read_bytes() == b"a chart"


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_a_server_takes_all_of_it_and_shows_what_was_written_past_it(settings: Settings) -> None:
    direct = Sent(TrackedRun(settings, "tiny-0", tracking={"traces": 0, "experiment": "direct"}))
    direct.made.steps(1)
    direct.made.evaluate(1.0)
    direct.send()
    with mlflow_server(settings) as server:
        through = Settings.from_environment(
            {"SAO_HOME": str(settings.home), "MLFLOW_TRACKING_URI": server.url}, settings.home
        )
        sent = Sent(complete_run(through))
        assert set(sent.models) == {"step-2", "step-4"}
        assert len(sent.traces()) == 6
        assert {metric.key for metric in sent.models["step-4"].metrics} >= {REWARD}
        version = sent.client.get_model_version("tiny", "1")
        assert version.source == f"models:/{sent.models['step-4'].model_id}"
        folder = resolve_model("models:/tiny/1", through)
        assert version.tags["sao.uri"] == f"file://{folder}"
        for one in (direct, sent):
            url = f"{server.url}/get-artifact?path=charts/training.png&run_uuid={one.run_id}"
            assert urlopen(url).read() == b"a chart"
        assert list(Path(settings.object_store, "artifacts").rglob(f"{sent.run_id}/artifacts/trajectories/4/*.html"))
        sent.send()
        assert len(sent.traces()) == 6
        assert len(versions(sent.client, "tiny")) == 1


@pytest.mark.usefixtures("quick")
def test_a_bucket_holds_files_and_policies_of_a_run(
    tmp_path: Path, new_mlflow: Path, migrated_sqlite: Path, s3_endpoint: str
) -> None:
    places = {"SAO_OBJECT_STORE": "s3://sao/tracked", "AWS_ENDPOINT_URL_S3": s3_endpoint}
    settings = empty_home(tmp_path / "home", new_mlflow, migrated_sqlite, **places)
    made = TrackedRun(settings, "tiny-1", tracking={"traces": 1})
    made.steps(1)
    made.checkpoint(1)
    made.evaluate(0.0, 1.0)
    made.complete()
    sent = Sent(made)
    assert sent.run.info.artifact_uri == f"s3://sao/tracked/artifacts/tiny/{sent.run_id}/artifacts"
    room = f"artifacts/tiny/{sent.run_id}/artifacts/"
    assert [key.removeprefix(room) for key in made.objects.keys("artifacts")] == [
        *("charts/training.html", "charts/training.png", "trajectories/1/best-1.html", "trajectories/1/worst-1.html"),
    ]
    version = sent.client.get_model_version("tiny", "1")
    assert version.source == f"s3://sao/tracked/{made.ledger.policy('tiny-1', 1).object_key}"
    folder = Path(resolve_model("models:/tiny/1", settings))
    assert folder.is_relative_to(settings.cache)
    assert (folder / "model.safetensors").read_text() == "tiny-1 version 1"
