"""Upkeep removes what nothing refers to and is old enough, and never anything else."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from healthy_run import Maker, make_healthy_run, new_run
from infra_fixtures import LEASE_S, TRAIN, Places, prompts
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from sqlalchemy import select, text

from infra.ledger import Ledger, NewRequest, RequestState, RunStatus
from infra.ledger.database import Mode
from infra.models import Base
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.upkeep import Action, Upkeep
from infra.verify import verify
from sao_core.trajectory import Purpose

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class Home:
    """An installation whose things can be made old."""

    def __init__(self, places: Places, ledger: Ledger, objects: ObjectStore, tmp: Path) -> None:
        self.places, self.ledger, self.objects, self.tmp = places, ledger, objects, tmp
        self.settings = Settings.from_environment({"SAO_HOME": str(tmp / "home")}, tmp)

    def upkeep(self, run: str, grace_s: float = HOUR_S, dry_run: bool = False) -> list[Action]:
        """One round; what it did for ``run`` (the database may hold runs of other tests)."""
        done = Upkeep(self.ledger, self.objects, self.settings, grace_s=grace_s, dry_run=dry_run).everything()
        return [action for action in done if run in action.subject or str(self.tmp) in action.subject]

    def sql(self, statement: str, **values: Any) -> None:
        self.ledger.transact(lambda connection: connection.execute(text(statement), values), Mode.WRITE)

    def age(self, run: str, seconds: float = DAY_S) -> None:
        """Make everything that the ledger says of a run older."""
        for table, columns in {
            "runs": ("created_at", "attempt_started_at", "ended_at"),
            "policies": ("published_at",),
            "checkpoints": ("created_at",),
            "workers": ("heartbeat_at",),
            "trajectories": ("recorded_at",),
        }.items():
            changes = ", ".join(f"{column} = {column} - :age" for column in columns)
            self.sql(f"UPDATE {table} SET {changes} WHERE run_id = :run", run=run, age=seconds)

    def age_objects(self, prefix: str, seconds: float = DAY_S) -> None:
        """Make objects older."""
        for found in self.objects.listing(prefix):
            at = found.modified_at - seconds
            path = self.objects.local_path(found.key)
            if path is not None:
                os.utime(path, (at, at))
            else:
                age_in_moto(self.places.object_store, found.key, seconds)

    def rows(self, run: str) -> dict[str, list[Any]]:
        def read(connection: Any) -> dict[str, list[Any]]:
            tables = [table for table in Base.metadata.sorted_tables if "run_id" in table.c]
            return {
                table.name: sorted(map(repr, connection.execute(select(table).where(table.c.run_id == run))))
                for table in tables
            }

        return self.ledger.transact(read, Mode.READ)

    def files(self) -> list[str]:
        return sorted(str(path) for path in self.settings.home.rglob("*"))


def age_in_moto(store: str, key: str, seconds: float) -> None:
    """Make an object of the S3 server older, which its protocol cannot."""
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[bucket].keys[f"{prefix}/{key}"]
    stored.last_modified -= timedelta(seconds=seconds)


@pytest.fixture
def home(places: Places, ledger: Ledger, objects: ObjectStore, tmp_path: Path) -> Home:
    return Home(places, ledger, objects, tmp_path)


@pytest.fixture
def finished(home: Home) -> str:
    """A healthy run that ended a day ago, with all that it stored."""
    run = make_healthy_run(home.places, home.ledger, home.objects, home.tmp)
    home.age(run)
    home.age_objects(f"runs/{run}")
    return run


def live_run(home: Home) -> Maker:
    """A run that began a day ago and whose worker holds version 0."""
    maker = Maker(home.places, home.ledger, home.objects, new_run(home.ledger), home.tmp)
    maker.updates.publish_initial(maker.folder("version 0"), step=0)
    home.age(maker.run)
    beat(home, maker.run, "rollout-0-aa", 0)
    return maker


def beat(home: Home, run: str, worker: str, version: int | None, state: str = "generating") -> None:
    home.ledger.heartbeat(run, worker, state, version, "host", 1, LEASE_S, purposes=TRAIN)


def kinds(actions: list[Action]) -> dict[str, int]:
    return {kind: sum(action.kind == kind for action in actions) for kind in {action.kind for action in actions}}


def test_what_a_run_refers_to_is_never_removed(home: Home, finished: str) -> None:
    """Trajectories that were trained, kept, ready and refused, parts, updates, policies and checkpoints."""
    before = set(home.objects.keys(f"runs/{finished}"))
    done = home.upkeep(finished, grace_s=0.0)
    assert {(action.kind, action.subject) for action in done} == {("policy", f"runs/{finished}/policies/2-1")}
    removed = {f"runs/{finished}/policies/2-1/{name}" for name in ("manifest.json", "model.safetensors")}
    assert before - set(home.objects.keys(f"runs/{finished}")) == removed
    assert home.ledger.policy(finished, 2).removed_at is not None
    found = verify(home.ledger, home.objects, finished)
    assert found.ok, found.violations
    assert found.orphans == ()
    assert found.checked["objects"] == 15
    assert home.upkeep(finished, grace_s=0.0) == []


ORPHANS = {
    "trajectories/w-0a/000001-aa.parquet": "trajectories/w-0a/000001-aa.parquet",
    "parts/w-0a/3-1-0000-aa.parquet": "parts/w-0a/3-1-0000-aa.parquet",
    "updates/9.parquet": "updates/9.parquet",
    "policies/9-1/manifest.json": "policies/9-1",
    "policies/9-1/model.safetensors": "policies/9-1",
    "checkpoints/9-1/critic/head.safetensors": "checkpoints/9-1",
}
"""Object that nothing refers to → what is removed with it."""


def test_orphans_go_after_the_grace_period(home: Home, finished: str) -> None:
    home.upkeep(finished)
    for rest in ORPHANS:
        home.objects.put(f"runs/{finished}/{rest}", b"left behind")
    assert home.upkeep(finished) == []
    for rest in ORPHANS:
        home.age_objects(f"runs/{finished}/{rest.rpartition('/')[0]}", 2 * HOUR_S)
    done = home.upkeep(finished)
    assert {action.subject for action in done} == {f"runs/{finished}/{rest}" for rest in ORPHANS.values()}
    assert {action.kind for action in done} == {"orphan"}
    assert sum(action.bytes for action in done) == 11 * len(ORPHANS)
    found = verify(home.ledger, home.objects, finished)
    assert (found.ok, found.orphans) == (True, ())


def test_a_folder_in_the_making_is_as_old_as_its_newest_file(home: Home, finished: str) -> None:
    folder = f"runs/{finished}/checkpoints/9-1"
    home.objects.put(f"{folder}/optimizer.bin", b"old")
    home.age_objects(folder)
    home.objects.put(f"{folder}/model.safetensors", b"new")
    assert [action for action in home.upkeep(finished) if action.kind == "orphan"] == []


def test_objects_of_a_run_that_this_ledger_does_not_know_are_left_alone(home: Home, finished: str) -> None:
    home.objects.put("runs/of-another-ledger/trajectories/w/1.parquet", b"theirs")
    home.objects.put(f"runs/{finished}/notes.txt", b"somebody's")
    home.age_objects("runs")
    home.upkeep(finished, grace_s=0.0)
    assert home.objects.exists("runs/of-another-ledger/trajectories/w/1.parquet")
    assert home.objects.exists(f"runs/{finished}/notes.txt")


@pytest.mark.parametrize("places", ["sqlite+folder"], indirect=True)
def test_temporary_files_go_even_beside_what_is_referred_to(home: Home, finished: str) -> None:
    """S3 has none."""
    policy = home.objects.local_path(f"runs/{finished}/policies/4-2")
    assert policy is not None
    (policy / ".model.safetensors.0a1b.partial").write_bytes(b"half")
    assert verify(home.ledger, home.objects, finished).orphans == (
        f"runs/{finished}/policies/4-2/.model.safetensors.0a1b.partial",
    )
    home.age_objects(f"runs/{finished}/policies")
    assert ("orphan", 4) in {(action.kind, action.bytes) for action in home.upkeep(finished)}
    assert verify(home.ledger, home.objects, finished).ok


def test_a_dry_run_lists_the_same_and_changes_nothing(home: Home, finished: str) -> None:
    live = live_run(home)
    live.issue(*prompts(1))
    home.ledger.lease(live.run, "w", TRAIN, 1, -5.0)
    silent = live_run(home)
    home.age(silent.run)
    home.objects.put(f"runs/{finished}/updates/9.parquet", b"left behind")
    home.age_objects(f"runs/{finished}/updates")
    scratch = home.settings.scratch / finished
    scratch.mkdir(parents=True)
    os.utime(scratch, (0, 0))
    runs = (finished, live.run, silent.run)
    before = [home.rows(run) for run in runs], home.objects.listing("runs"), home.files()
    listed = [home.upkeep(run, dry_run=True) for run in runs]
    assert [kinds(actions) for actions in listed] == [
        {"policy": 1, "orphan": 1, "scratch": 1},
        {"lease": 1, "scratch": 1},
        {"run": 1, "scratch": 1},
    ]
    assert ([home.rows(run) for run in runs], home.objects.listing("runs"), home.files()) == before


def test_a_live_run_keeps_what_may_be_on_its_way_to_the_ledger_whatever_the_grace_period(home: Home) -> None:
    run = live_run(home).run
    key = f"runs/{run}/trajectories/w/000001-aa.parquet"
    home.objects.put(key, b"its row comes as soon as the ledger is back")
    home.age_objects(f"runs/{run}", 300.0)
    assert home.upkeep(run, grace_s=0.0) == []
    home.age_objects(f"runs/{run}", 600.0)
    assert [action.subject for action in home.upkeep(run, grace_s=0.0)] == [key]


def test_leases_that_ran_out_cost_an_attempt_only_while_the_run_is_alive(home: Home) -> None:
    for alive, attempts in ((True, 1), (False, 0)):
        maker = live_run(home)
        maker.issue(*prompts(2))
        home.ledger.lease(maker.run, "v", TRAIN, 1, DAY_S)
        home.ledger.lease(maker.run, "w", TRAIN, 1, -60.0)
        if not alive:
            home.age(maker.run)
        (action, *_) = home.upkeep(maker.run)
        assert (action.kind, action.subject) == ("lease", f"{maker.run} request 1")
        assert action.reason == "of w, ran out 60 s ago"
        states = home.ledger.request_states(maker.run, Purpose.TRAIN)
        assert states == {RequestState.PENDING: 1, RequestState.LEASED: 1}
        found = verify(home.ledger, home.objects, maker.run)
        assert (found.ok, found.checked["attempts"]) == (True, 1 + attempts)


def test_a_run_whose_processes_are_all_silent_is_interrupted_and_can_be_resumed(home: Home) -> None:
    alive, silent, new = live_run(home).run, live_run(home), new_run(home.ledger)
    silent.issue(*prompts(3))
    silent.generate(2)
    assert silent.batches.claim(1) is not None
    home.age(silent.run, 2 * HOUR_S)
    (action,) = home.upkeep(silent.run)
    assert (action.kind, action.subject) == ("run", silent.run)
    record = home.ledger.run(silent.run)
    assert record.status is RunStatus.INTERRUPTED
    assert "2 hours ago" in record.message
    assert f"sao train --resume {silent.run}" in record.message
    assert verify(home.ledger, home.objects, silent.run).ok
    assert {home.ledger.run(run).status for run in (alive, new)} == {RunStatus.RUNNING}
    assert home.upkeep(silent.run) == []
    home.ledger.begin_attempt(silent.run)
    assert home.ledger.run(silent.run).status is RunStatus.RUNNING
    assert home.upkeep(silent.run) == []
    assert verify(home.ledger, home.objects, silent.run).ok


def test_a_process_that_is_only_slow_does_not_end_its_run_whatever_the_grace_period(home: Home) -> None:
    run = live_run(home).run
    home.age(run, 60.0)
    assert home.upkeep(run, grace_s=0.0) == []
    assert home.ledger.run(run).status is RunStatus.RUNNING


def rewound(home: Home) -> Maker:
    """A live run that went back from step 3 to step 0 a day ago: versions 1 … 3 are superseded."""
    maker = live_run(home)
    maker.issue(*prompts(6))
    maker.generate(6)
    for step in (1, 2, 3):
        maker.step(step)
    maker.checkpoint(2)
    home.ledger.rewind(maker.run, 0)
    home.age(maker.run)
    home.age_objects(f"runs/{maker.run}")
    return maker


def stored(home: Home, run: str) -> list[int]:
    """Versions whose files are there, by ledger and by store, which agree."""
    versions = [policy.version for policy in home.ledger.policies(run) if policy.removed_at is None]
    present = [p.version for p in home.ledger.policies(run) if home.objects.exists(f"{p.object_key}/manifest.json")]
    assert present == versions
    return versions


def test_superseded_policies_go_and_surviving_ones_stay(home: Home) -> None:
    run = rewound(home).run
    beat(home, run, "rollout-0-aa", 9)
    actions = home.upkeep(run)
    assert kinds(actions) == {"policy": 3}
    assert all(action.bytes > 0 for action in actions)
    assert stored(home, run) == [0]
    assert verify(home.ledger, home.objects, run).ok


def test_no_policy_goes_that_a_live_worker_holds_or_may_be_loading(home: Home) -> None:
    run = rewound(home).run
    beat(home, run, "rollout-0-aa", 2)
    beat(home, run, "rollout-1-bb", 1, "stopped")
    home.upkeep(run)
    assert stored(home, run) == [0, 2, 3]
    beat(home, run, "rollout-0-aa", 3)
    home.upkeep(run)
    assert stored(home, run) == [0, 3]


def test_no_policy_goes_while_a_worker_loads_its_first_one(home: Home) -> None:
    run = rewound(home).run
    beat(home, run, "rollout-0-aa", 9)
    beat(home, run, "rollout-1-bb", None, "starting")
    assert home.upkeep(run) == []
    assert stored(home, run) == [0, 1, 2, 3]


def test_no_policy_goes_whose_evaluation_is_not_reported(home: Home) -> None:
    maker = live_run(home)
    maker.issue(*prompts(2))
    maker.generate(2)
    maker.step(1)
    maker.issue(NewRequest(Purpose.EVALUATE, "held-out", policy_version=1))
    home.ledger.rewind(maker.run, 0)
    home.age(maker.run)
    beat(home, maker.run, "rollout-0-aa", 9)
    assert home.upkeep(maker.run) == []
    home.ledger.cancel_requests(maker.run)
    assert home.upkeep(maker.run) == []
    home.ledger.add_evaluation(maker.run, 1, 1, "calculator", {}, "0" * 64)
    assert kinds(home.upkeep(maker.run)) == {"policy": 1}


def test_what_was_superseded_a_moment_ago_stays_for_the_grace_period(home: Home) -> None:
    maker = rewound(home)
    home.ledger.begin_attempt(maker.run)
    home.age(maker.run, HOUR_S / 2)
    beat(home, maker.run, "rollout-0-aa", 9)
    assert home.upkeep(maker.run) == []
    home.age(maker.run, HOUR_S)
    beat(home, maker.run, "rollout-0-aa", 9)
    assert kinds(home.upkeep(maker.run)) == {"policy": 3}


def test_superseded_checkpoints_go_with_a_run_that_is_over_unless_they_have_a_name(home: Home) -> None:
    named, nameless, live = rewound(home), rewound(home), rewound(home)
    home.sql("UPDATE checkpoints SET name = 'best' WHERE run_id = :run", run=named.run)
    for maker in (named, nameless):
        home.ledger.set_status(maker.run, "failed")
        home.age(maker.run)
    beat(home, live.run, "rollout-0-aa", 0)
    assert kinds(home.upkeep(named.run)) == {"policy": 3}
    home.upkeep(live.run)
    for maker, left in ((named, True), (nameless, False), (live, True)):
        assert home.objects.exists(f"runs/{maker.run}/checkpoints/2-1/manifest.json") is left
        found = verify(home.ledger, home.objects, maker.run)
        assert (found.ok, found.orphans) == (True, ())


def test_scratch_and_downloads_of_runs_that_are_over_go(home: Home, finished: str) -> None:
    live = live_run(home).run
    needed = home.ledger.policy(live, 0).sha256
    folders = {
        home.settings.scratch / finished: False,
        home.settings.scratch / live: True,
        home.settings.cache / "policies" / "f00": False,
        home.settings.cache / "policies" / needed: True,
        home.settings.cache / "checkpoints" / "f00": False,
        home.settings.cache / "checkpoints" / "f01": True,
    }
    for folder in folders:
        (folder / "critic").mkdir(parents=True)
        (folder / "critic" / "head.safetensors").write_bytes(b"12345")
        for path in (folder / "critic" / "head.safetensors", folder / "critic", folder):
            os.utime(path, (0, 0))
    (home.settings.cache / "checkpoints" / "f01" / "just-now").touch()
    done = [action for action in home.upkeep(finished) if action.kind in ("scratch", "cache")]
    assert {(action.subject, action.bytes) for action in done} == {
        (str(f), 5) for f, left in folders.items() if not left
    }
    assert {folder: folder.exists() for folder in folders} == folders


def test_a_grace_period_is_not_negative(home: Home) -> None:
    with pytest.raises(ValueError, match="at least 0 s: got -1"):
        home.upkeep("any", grace_s=-1.0)
