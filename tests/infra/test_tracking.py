"""MLflow on a real SQLite store, and servers that hang, refuse, and come back."""

import contextlib
import json
import logging
import socket
import sqlite3
import time
from dataclasses import dataclass, field, replace

import pytest
from mlflow import MlflowClient

from infra.ledger import EvaluationRecord, RunRecord, RunStatus, UpdateRow
from infra.settings import Settings
from infra.tracking import Tracker, flatten, spans
from infra.tracking.description import datasets
from sao_core.config import parse_config

CONFIG = parse_config({"recipe": "tiny", "policy": {"lr": 0.001}, "environment": {"options": {"a|b": [1]}}})


@dataclass
class MemoryLedger:
    """What tracking reads and writes, of one run."""

    record: RunRecord
    updates: list[UpdateRow] = field(default_factory=list)
    results: list[EvaluationRecord] = field(default_factory=list)
    superseded: list[int] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=lambda: {"update": -1, "evaluation": 0})

    def commit(self, *steps, **metrics):
        for step in steps:
            values = metrics or {"policy/loss": step / 8, "reward/mean": step / 10}
            self.updates.append(UpdateRow(step, step, step + 1, 64, values, None, 1_700_000_000.25 + step, 64 * step))

    def run(self, run_id):
        return self.record

    def updates_since(self, run_id, watermark, limit=None):
        return [update for update in self.updates if update.step > watermark][:limit]

    def superseded_steps(self, run_id):
        return self.superseded

    def evaluations(self, run_id, after=0):
        return [result for result in self.results if result.number > after]

    def watermark(self, run_id, kind="update"):
        return self.marks[kind]

    def set_watermark(self, run_id, value, kind="update"):
        self.marks[kind] = max(self.marks[kind], value)

    def set_run_links(self, run_id, mlflow_run_id=None):
        self.record = replace(self.record, mlflow_run_id=mlflow_run_id)


@pytest.fixture
def ledger():
    return MemoryLedger(
        RunRecord(
            run_id="tiny-1",
            recipe="tiny",
            algorithm="sao",
            status=RunStatus.RUNNING,
            config={},
            created_at=1_700_000_000.0,
            ended_at=None,
            message="",
            attempt=1,
            mlflow_run_id=None,
            prefect_flow_run_id="f00",
            step=0,
        )
    )


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory):
    """A migrated, empty database to copy: making one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def settings(tmp_path, empty_mlflow):
    (tmp_path / "mlflow.db").write_bytes(empty_mlflow.read_bytes())
    environ = {"SAO_HOME": str(tmp_path), "PREFECT_API_URL": "http://prefect:4200/api"}
    return Settings.from_environment(environ, tmp_path)


@pytest.fixture
def client(settings):
    return MlflowClient(settings.tracking_uri)


def points(settings):
    """Every stored point as (key, step, value, milliseconds)."""
    with contextlib.closing(sqlite3.connect(settings.home / "mlflow.db")) as database:
        return sorted(database.execute("SELECT key, step, value, timestamp FROM metrics"))


def track(ledger, settings, status="completed", config=CONFIG):
    tracker = Tracker(ledger, "tiny-1", settings, config)
    tracker.start()
    tracker.poke()
    return tracker.close(status, 30)


def test_metrics_arrive_with_the_ledgers_steps_and_times(ledger, settings):
    ledger.commit(1, 2)
    assert track(ledger, settings)
    assert points(settings) == [
        ("policy/loss", 1, 0.125, 1_700_000_001_250),
        ("policy/loss", 2, 0.25, 1_700_000_002_250),
        ("reward/mean", 1, 0.1, 1_700_000_001_250),
        ("reward/mean", 2, 0.2, 1_700_000_002_250),
    ]
    assert ledger.marks["update"] == 2


def test_a_run_is_described_by_experiment_params_and_tags(ledger, settings, client):
    assert track(ledger, settings)
    run = client.get_run(ledger.record.mlflow_run_id)
    assert client.get_experiment(run.info.experiment_id).name == "tiny"
    assert run.info.run_name == "tiny-1"
    assert run.info.start_time == 1_700_000_000_000
    assert run.data.params["policy.lr"] == "0.001"
    assert run.data.params["learner.batch_size"] == "128"
    assert run.data.params["environment.options.a_b"] == "[1]"
    tags = run.data.tags
    assert {key: tags[key] for key in ("sao.run", "algorithm", "recipe", "environment", "model", "seed")} == {
        "sao.run": "tiny-1",
        "algorithm": "sao",
        "recipe": "tiny",
        "environment": "calculator",
        "model": "tiny",
        "seed": "0",
    }
    assert tags["prefect_flow_run_url"] == "http://prefect:4200/runs/flow-run/f00"


@pytest.mark.parametrize(
    ("environment", "options", "version"),
    [
        ("calculator", {}, "1"),
        ("code_repair", {}, None),
        ("mixture", {"parts": {"calculator": {}, "sorting": {}}}, None),
        ("nowhere:SPEC", {}, None),
    ],
    ids=["as it is", "needs a sandbox", "of several", "not installed here"],
)
def test_the_version_of_an_environment_is_known_or_missing_without_noise(environment, options, version, caplog):
    config = parse_config({"environment": {"name": environment, "options": options}})
    training, held_out = datasets(config)
    assert [json.loads(one.dataset.profile)["version"] for one in (training, held_out)] == [version, version]
    assert caplog.records == []


def test_sending_everything_twice_gives_one_point_per_step(ledger, settings):
    ledger.commit(*range(1, 31))
    assert track(ledger, settings)
    once = points(settings)
    assert len(once) == 60
    ledger.marks["update"] = -1
    assert track(ledger, settings)
    assert points(settings) == once


def test_a_resume_goes_on_in_the_same_run_and_tells_what_was_superseded(ledger, settings, client):
    ledger.commit(1, 2, 3)
    assert track(ledger, settings, "cancelled")
    first = ledger.record.mlflow_run_id
    assert client.get_run(first).info.status == "KILLED"
    before = points(settings)
    ledger.record = replace(ledger.record, mlflow_run_id=None)  # found again by its tag
    ledger.superseded = [2, 3]
    ledger.updates = ledger.updates[:1]
    ledger.commit(2, 3, **{"policy/loss": 9.0})
    ledger.commit(4)
    changed = parse_config({**CONFIG.model_dump(mode="json"), "policy": {"lr": 0.5}})
    assert track(ledger, settings, config=changed)
    assert ledger.record.mlflow_run_id == first
    run = client.get_run(first)
    assert run.info.status == "FINISHED"
    assert run.data.tags["superseded_steps"] == "2-3"
    assert run.data.tags["changed_params"] == '{"policy.lr": "0.5"}'
    assert run.data.params["policy.lr"] == "0.001"
    assert [point for point in points(settings) if point[1] < 4] == before


def test_a_step_sent_before_a_kill_and_made_again_has_one_point(ledger, settings):
    """The kill came between the points of steps 2 and 3 and the watermark; both were undone and made anew."""
    ledger.commit(1, 2, 3)
    assert track(ledger, settings, "interrupted")
    ledger.marks["update"] = 1
    ledger.updates[1:] = [
        replace(row, committed_at=row.committed_at + 60, metrics={"reward/mean": 9.0, "new": 1.0})
        for row in ledger.updates[1:]
    ]
    ledger.superseded = [2, 3]
    ledger.commit(4)
    assert track(ledger, settings)
    found = [(key, step, value) for key, step, value, _ in points(settings) if key in ("reward/mean", "new")]
    assert found == [("new", 2, 1.0), ("new", 3, 1.0), *[("reward/mean", step, step / 10) for step in (1, 2, 3, 4)]]


def test_a_new_mlflow_gets_the_whole_history(ledger, settings, client):
    ledger.commit(1, 2)
    ledger.marks["update"] = 2
    ledger.record = replace(ledger.record, mlflow_run_id="0" * 32)
    assert track(ledger, settings)
    assert {point[1] for point in points(settings)} == {1, 2}


@pytest.mark.parametrize(
    ("status", "shown"),
    [("completed", "FINISHED"), ("failed", "FAILED"), ("cancelled", "KILLED"), ("interrupted", "KILLED")],
)
def test_the_runs_end_is_shown(ledger, settings, client, status, shown):
    ledger.record = replace(ledger.record, ended_at=1_700_000_100.5)
    assert track(ledger, settings, status)
    info = client.get_run(ledger.record.mlflow_run_id).info
    assert (info.status, info.end_time) == (shown, 1_700_000_100_500)


def test_an_evaluation_is_a_child_run_and_stands_on_the_parent(ledger, settings, client):
    metrics = {"eval/calculator/reward_mean": 0.75, "eval/calculator/greedy_reward_mean": 0.875}
    ledger.results = [EvaluationRecord(7, 20, 21, "calculator", metrics, "ab" * 32, 1_700_000_050.0)]
    assert track(ledger, settings)
    ledger.marks["evaluation"] = 0
    assert track(ledger, settings)  # sent twice: still one child
    parent = client.get_run(ledger.record.mlflow_run_id)
    assert parent.data.metrics == metrics
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert len(children) == 1
    child = children[0]
    assert child.data.metrics == metrics
    assert child.data.tags["policy_sha256"] == "ab" * 32
    assert (child.info.run_name, child.info.status) == ("calculator at step 20", "FINISHED")
    assert client.get_metric_history(parent.info.run_id, "eval/calculator/reward_mean")[0].step == 20
    assert len(points(settings)) == 4


def test_news_arrive_while_the_run_lasts(ledger, settings):
    tracker = Tracker(ledger, "tiny-1", settings, CONFIG)
    tracker.start()
    ledger.commit(1)
    tracker.poke()
    deadline = time.monotonic() + 20
    while ledger.marks["update"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {point[1] for point in points(settings)} == {1}
    assert tracker.close("completed", 20)


def test_a_nonfinite_metric_does_not_stop_the_queue(ledger, settings):
    ledger.commit(1, **{"policy/loss": float("nan"), "value/loss": float("inf"), "a@b": 1.0})
    ledger.commit(2)
    assert track(ledger, settings)
    assert {(key, step) for key, step, _, _ in points(settings)} >= {("policy/loss", 1), ("a_b", 1), ("policy/loss", 2)}


@contextlib.contextmanager
def port(answers):
    """A port that refuses (False), or accepts and never answers (True)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("hung", [False, True])
def test_a_dead_or_hung_server_neither_blocks_nor_fails_and_the_rest_is_sent_later(ledger, settings, hung, caplog):
    with port(answers=hung) as uri, caplog.at_level(logging.WARNING, logger="infra.tracking"):
        away = replace(settings, tracking_uri=uri)
        tracker = Tracker(ledger, "tiny-1", away, CONFIG)
        slowest = 0.0
        for step in range(1, 21):
            start = time.perf_counter()
            tracker.start() if step == 1 else tracker.poke()
            slowest = max(slowest, time.perf_counter() - start)
            ledger.commit(step)
            time.sleep(0.02)
        start = time.monotonic()
        assert tracker.close("completed", 1.0) is False
        assert time.monotonic() - start < 1.5
        assert slowest < 0.1
        assert "sao sync tiny-1" in caplog.records[-1].message
        assert len(caplog.records) <= 2
    assert ledger.marks["update"] == -1
    ledger.record = replace(ledger.record, status=RunStatus.COMPLETED)
    assert Tracker.sync(ledger, "tiny-1", settings, CONFIG)
    assert [step for _, step, _, _ in points(settings)][:20] == list(range(1, 21))


def test_a_store_that_fails_is_told_in_one_line(ledger, settings, caplog, capfd):
    """MLflow prints the traceback of each failed transaction, unless it is kept from it."""
    ledger.commit(1)
    with contextlib.closing(sqlite3.connect(settings.home / "mlflow.db")) as database:
        database.execute("DROP TABLE metrics")
    assert not Tracker.sync(ledger, "tiny-1", settings, CONFIG)
    assert "Traceback" not in capfd.readouterr().err
    assert [len(record.getMessage().splitlines()) for record in caplog.records if record.name == "infra.tracking"] == [
        1
    ]


def test_sync_says_when_it_could_not(ledger, settings, caplog):
    with port(answers=False) as uri:
        assert not Tracker.sync(ledger, "tiny-1", replace(settings, tracking_uri=uri), CONFIG)
    assert "MLflow at http://127.0.0.1" in caplog.text


def test_settings_become_dotted_names():
    assert flatten({"a": {"b": 1, "c": None}, "d": "x", "e|f": [1, "y"]}) == {
        "a.b": "1",
        "a.c": "null",
        "d": "x",
        "e_f": '[1, "y"]',
    }


def test_steps_are_told_as_spans():
    assert spans([]) == ""
    assert spans([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"
