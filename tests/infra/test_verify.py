"""`verify` finds nothing in a healthy run, and every violation that is planted in it."""

from __future__ import annotations

import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from healthy_run import CONFIG, UPDATES, Maker, make_healthy_run, new_run
from infra_fixtures import Places, group, prompts, trajectory
from planted_violations import FIRST_ATTEMPT, PLANTS, POLICY, REQUEST, Healthy

from infra.ledger import Ledger, UnknownRun
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.tracking import Tracker
from infra.verify import verify


@pytest.fixture(scope="module", params=["sqlite+folder", pytest.param("postgres+s3", marks=pytest.mark.long)])
def made(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_sqlite: Path,
    new_mlflow: Path,
) -> Iterator[Healthy]:
    tmp = tmp_path_factory.mktemp("healthy")
    if request.param == "sqlite+folder":
        shutil.copy(migrated_sqlite, tmp / "ledger.db")
        places = Places(f"sqlite:///{tmp / 'ledger.db'}", str(tmp / "objects"), None, tmp / "cache")
    else:
        postgres, endpoint = request.getfixturevalue("postgres_database"), request.getfixturevalue("s3_endpoint")
        places = Places(postgres, f"s3://sao/{secrets.token_hex(4)}", endpoint, tmp / "cache")
    ledger = Ledger(places.database_url)
    objects = ObjectStore(places.object_store, endpoint_url=places.endpoint_url)
    run = make_healthy_run(places, ledger, objects, tmp)
    shutil.copy(new_mlflow, tmp / "mlflow.db")
    settings = Settings.from_environment({"SAO_HOME": str(tmp)}, tmp)
    assert Tracker.sync(ledger, run, settings, CONFIG)
    yield Healthy.of(ledger, objects, run, tmp / "mlflow.db")
    ledger.close()


@pytest.fixture
def healthy(made: Healthy) -> Iterator[Healthy]:
    yield made
    made.restore()


@pytest.fixture
def tracking_uri(healthy: Healthy, tmp_path: Path) -> str:
    """A copy of MLflow's store."""
    shutil.copy(healthy.mlflow, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


RULES = {
    *("request-state", "attempts", "recorded-once", "trained-once", "step-accounts", "gapless-steps"),
    *("gapless-versions", "weights", "objects", "parts", "mlflow-points", "ended-run"),
}


def test_a_healthy_run_is_found_whole_and_every_rule_looked_at_something(healthy: Healthy, tracking_uri: str) -> None:
    found = healthy.verify(tracking_uri)
    assert found.ok, found.violations
    assert found.violations == ()
    assert found.skipped == {}
    assert found.orphans == ()
    assert found.checked.keys() == RULES
    assert {rule for rule, count in found.checked.items() if count == 0} == set()
    assert (found.checked["step-accounts"], found.checked["request-state"]) == (UPDATES, 15)


def test_what_nothing_refers_to_is_listed_and_no_violation(healthy: Healthy) -> None:
    stray = [
        *("checkpoints/9/model.safetensors", "policies/77/manifest.json", "trajectories/w-0a/.x.partial"),
        *("trajectories/w-0a/000001-aa.parquet", "updates/9.parquet"),
    ]
    for rest in stray:
        healthy.put(healthy.path(rest), b"left behind")
    healthy.sql(POLICY.format("removed_at = 1.0", 2))
    found = healthy.verify()
    assert found.ok
    removed = [healthy.policy_key(2, name) for name in ("manifest.json", "model.safetensors")]
    assert list(found.orphans) == sorted([*map(healthy.path, stray), *removed])


def test_rows_of_a_version_that_had_fewer_columns_are_whole(healthy: Healthy) -> None:
    healthy.sql("UPDATE trajectories SET duration_s = NULL, environment_version = NULL WHERE run_id = :run")
    assert healthy.verify().violations == ()
    healthy.sql("UPDATE trajectories SET duration_s = 99.0 WHERE run_id = :run AND request_number = 2")
    (violation,) = healthy.verify().violations
    assert "the ledger says duration_s 99.0" in violation.detail


def test_a_run_whose_tasks_came_to_an_end_is_whole_with_fewer_updates(healthy: Healthy) -> None:
    config = '{"learner": {"updates": 9}}'
    healthy.sql("UPDATE runs SET config_json = :config WHERE run_id = :run", config=config)
    (violation,) = healthy.verify().violations
    assert "completed after step 4 of 9" in violation.detail
    healthy.sql("UPDATE frontiers SET closed = true WHERE run_id = :run AND purpose = 'train'")
    assert healthy.verify().violations == ()


def test_an_unknown_run_is_refused(healthy: Healthy) -> None:
    with pytest.raises(UnknownRun, match="no run nobody"):
        verify(healthy.ledger, healthy.objects, "nobody")


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_violation_is_found_and_named(healthy: Healthy, name: str) -> None:
    plant = PLANTS[name]
    plant.make(healthy)
    found = healthy.verify()
    named = {(violation.rule, violation.subject) for violation in found.violations}
    assert not found.ok
    subject = plant.subject.format(run=healthy.run, part=healthy.part_id(1))
    assert (plant.rule, subject) in named, found.violations


def test_every_rule_has_a_plant() -> None:
    assert {plant.rule for plant in PLANTS.values()} | {"mlflow-points"} == RULES


POINTS = "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES ('reward/mean', 1, 7, '{}', {}, 0)"
MLFLOW_PLANTS = {
    "a point is missing": ("DELETE FROM metrics WHERE key = 'time/step_s' AND step = 3 AND run_uuid = '{}'", "step 3"),
    "a step has two points": (POINTS.format("{}", 2), "step 2"),
    "a point of no step": (POINTS.format("{}", 9), "step 9"),
}


@pytest.mark.parametrize("name", MLFLOW_PLANTS)
def test_a_violation_in_mlflow_is_found_and_named(healthy: Healthy, tracking_uri: str, name: str) -> None:
    statement, subject = MLFLOW_PLANTS[name]
    mlflow_run_id = healthy.ledger.run(healthy.run).mlflow_run_id
    with closing(sqlite3.connect(tracking_uri.removeprefix("sqlite:///"))) as database, database:
        assert database.execute(statement.format(mlflow_run_id)).rowcount == 1
    (violation,) = healthy.verify(tracking_uri).violations
    assert (violation.rule, violation.subject) == ("mlflow-points", subject)


def test_a_step_that_mlflow_has_yet_to_get_is_no_violation(healthy: Healthy, tracking_uri: str) -> None:
    healthy.sql("UPDATE runs SET tracked_step = 3 WHERE run_id = :run")
    with closing(sqlite3.connect(tracking_uri.removeprefix("sqlite:///"))) as database, database:
        database.execute("DELETE FROM metrics WHERE step = 4")
    found = healthy.verify(tracking_uri)
    assert found.ok, found.violations
    assert found.checked["mlflow-points"] == 6


def test_a_step_that_a_live_run_made_meanwhile_is_no_violation(healthy: Healthy, tracking_uri: str) -> None:
    healthy.sql("UPDATE runs SET status = 'running', ended_at = NULL WHERE run_id = :run")
    mlflow_run_id = healthy.ledger.run(healthy.run).mlflow_run_id
    with closing(sqlite3.connect(tracking_uri.removeprefix("sqlite:///"))) as database, database:
        database.execute(POINTS.format(mlflow_run_id, 9))
    found = healthy.verify(tracking_uri)
    assert found.ok, found.violations


def test_an_mlflow_that_cannot_be_asked_is_skipped_with_the_reason(healthy: Healthy, tmp_path: Path) -> None:
    started = time.monotonic()
    for uri, reason in {
        "http://127.0.0.1:9": "cannot be read",
        f"sqlite:///{tmp_path / 'nothing.db'}": "there is no",
        None: "no MLflow was named",
    }.items():
        found = healthy.verify(uri)
        assert found.ok
        assert reason in found.skipped["mlflow-points"]
        assert "mlflow-points" not in found.checked
    assert time.monotonic() - started < 30
    assert not (tmp_path / "nothing.db").exists()
    healthy.sql("UPDATE runs SET mlflow_run_id = NULL WHERE run_id = :run")
    assert healthy.verify(None).skipped == {"mlflow-points": "the run is not in MLflow"}


def test_a_rollout_that_was_rejected_because_its_object_is_damaged_is_accounted_for(healthy: Healthy) -> None:
    healthy.lose(healthy.key(9, attempt=1))
    assert not healthy.verify().ok
    healthy.sql(FIRST_ATTEMPT.format("reject_reason = 'object damaged: gone'", 9))
    assert healthy.verify().ok


def test_attempts_made_under_a_bound_that_a_resume_changed_are_no_violation(healthy: Healthy) -> None:
    healthy.sql("UPDATE runs SET max_attempts = 1 WHERE run_id = :run")
    assert {violation.rule for violation in healthy.verify().violations} == {"attempts"}
    healthy.sql(
        "INSERT INTO config_changes (run_id, attempt, setting, old_json, new_json, step, changed_at) "
        "VALUES (:run, 3, 'rollout.max_attempts', '3', '1', 4, 0.0)"
    )
    assert healthy.verify().ok


def test_a_group_that_was_given_up_is_whole(
    ledger: Ledger, objects: ObjectStore, places: Places, tmp_path: Path
) -> None:
    maker = Maker(places, ledger, objects, new_run(ledger), tmp_path)
    maker.updates.publish_initial(maker.folder("version 0"), step=0)
    maker.issue(*group(7, size=3))
    maker.generate(1)
    maker.lease(1)
    for _ in range(3):
        maker.fail()
    assert verify(ledger, objects, maker.run).ok
    maker.close()


def test_a_run_with_everything_in_flight_is_whole(
    ledger: Ledger, objects: ObjectStore, places: Places, tmp_path: Path
) -> None:
    """Pending, leased, ready and claimed at once, a part that the next worker goes on from, and a resume of that."""
    maker = Maker(places, ledger, objects, new_run(ledger), tmp_path)
    assert verify(ledger, objects, maker.run).ok
    maker.updates.publish_initial(maker.folder("version 0"), step=0)
    maker.issue(*prompts(6))
    maker.generate(3)
    assert maker.batches.claim(1) is not None
    first, second = maker.lease(2)
    maker.part(first, 0, state="{}")
    maker.part(second, 0)
    for attempt in (1, 2):
        found = verify(ledger, objects, maker.run)
        assert found.ok, found.violations
        assert found.orphans == ()
        assert (found.checked["parts"], found.checked["trained-once"]) == (2, 2 if attempt == 1 else 0)
        ledger.begin_attempt(maker.run)
    ledger.set_status(maker.run, "failed", "a worker died")
    assert verify(ledger, objects, maker.run).ok
    maker.close()


def test_a_live_run_is_found_whole_at_every_moment(
    ledger: Ledger, objects: ObjectStore, places: Places, tmp_path: Path
) -> None:
    """Rollouts, parts, steps, checkpoints, retention and rewinds go on while it is verified."""
    run = new_run(ledger)

    def live() -> None:
        for _ in range(2):
            maker = Maker(places, ledger, objects, run, tmp_path, keep_policies=1)
            if maker.updates.latest_checkpoint() is None:
                maker.updates.publish_initial(maker.folder("version 0"), step=0)
            for step in range(ledger.last_step(run) + 1, ledger.last_step(run) + 5):
                maker.issue(*prompts(3))
                (request,) = maker.lease()
                maker.part(request, 0, state="{}")
                maker.put((trajectory(request),))
                maker.fail(parts=1)
                maker.generate(2)
                maker.step(step)
                if step % 2 == 0:
                    maker.checkpoint(step)
            maker.close()

    with ThreadPoolExecutor(1) as thread:
        living = thread.submit(live)
        looked = 0
        while not living.done():
            found = verify(ledger, objects, run)
            assert found.ok, found.violations
            looked += 1
        living.result()
    assert looked > 2
    assert verify(ledger, objects, run).ok
    assert ledger.last_step(run) == 8


def test_what_was_planted_is_gone_again(healthy: Healthy) -> None:
    healthy.sql(REQUEST.format("state = 'parked'", 13))
    healthy.lose(healthy.key(11))
    assert not healthy.verify().ok
    healthy.restore()
    assert healthy.verify().ok
