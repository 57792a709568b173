"""Store, database and disk go away under a run and come back: it goes on by itself, and nothing is lost."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_proxy import Fault, FaultyProxy
from rig import Result, finish_rig, run_rig, start_rig
from rig_plan import Plan
from rig_services import S3, Postgres

Places = Callable[[str], dict[str, object]]
Held = Callable[[Plan, Result], None]
LONG_FAULTS = ("refuses", "is slow", "breaks off")


@contextmanager
def running(plan: Plan) -> Iterator[list[Result]]:
    """A rig whose members nobody kills; after the body it is told to come to its end, and its result is in the list."""
    results: list[Result] = []
    process = start_rig(plan)
    try:
        wait_for_records(plan, more=8)
        yield results
        wait_for_records(plan, more=8)
        plan.calm.touch()
        results.append(finish_rig(plan, process))
    finally:
        process.kill()
        process.wait()


def wait_for_records(plan: Plan, more: int, patience_s: float = 150.0) -> None:
    """Return once the members have recorded ``more`` rollouts than now."""
    before = sum(1 for _ in plan.said("recorded"))
    deadline = time.monotonic() + patience_s
    while sum(1 for _ in plan.said("recorded")) < before + more:
        assert time.monotonic() < deadline, f"nothing gets on: {plan.path('rig.log').read_text()[-3000:]}"
        assert not plan.path("result.json").exists(), plan.path("result.json").read_text()
        time.sleep(0.05)


def nobody_died(result: Result) -> None:
    assert not result.kills
    assert result.attempts == 1, "the run was to go on by itself, in its first attempt"


@pytest.mark.parametrize("fault", ["answers 503", *(pytest.param(f, marks=pytest.mark.long) for f in LONG_FAULTS)])
def test_an_object_store_that_is_away_for_a_while_costs_only_time(
    fault: Fault, outage_s: float, seed: int, places: Places, held: Held, s3: S3
) -> None:
    proxy = FaultyProxy(s3.port)
    where = places("postgres+s3") | {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    plan = Plan(seed=seed, limit_s=300 + outage_s, lease_s=30.0, silent_s=90.0, **where)
    try:
        with running(plan) as results:
            proxy.be(fault)
            time.sleep(outage_s)
            proxy.be("none")
    finally:
        proxy.close()
    assert proxy.hit > 0 or "trying again" in plan.path("rig.log").read_text(), "somebody met the fault"
    held(plan, results[0])
    nobody_died(results[0])


@pytest.mark.parametrize("mode", ["immediate", pytest.param("fast", marks=pytest.mark.long)])
def test_a_database_that_restarts_costs_only_time(
    mode: str, outage_s: float, seed: int, places: Places, held: Held, postgres: Postgres
) -> None:
    """`immediate` is a crash: what was committed must be there again."""
    plan = Plan(seed=seed, limit_s=300 + outage_s, lease_s=30.0, silent_s=90.0, **places("postgres+s3"))
    with running(plan) as results:
        postgres.stop(mode)
        try:
            time.sleep(min(outage_s, 30.0))
        finally:
            postgres.start()
    held(plan, results[0])
    nobody_died(results[0])


def test_a_ledger_file_that_another_process_locks_costs_only_time(
    outage_s: float, seed: int, places: Places, held: Held
) -> None:
    plan = Plan(seed=seed, limit_s=300, lease_s=30.0, silent_s=90.0, **places("sqlite+folder"))
    with running(plan) as results, closing(sqlite3.connect(plan.path("ledger.db"), timeout=60)) as intruder:
        intruder.execute("BEGIN IMMEDIATE")
        time.sleep(min(outage_s, 10.0))
        intruder.rollback()
    held(plan, results[0])
    nobody_died(results[0])


def can_mount() -> bool:
    """Whether this user may have a disk of its own to fill."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    probe = [unshare, "-rm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /tmp"]
    return subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.parametrize("how", ["full disk", "writes fail"])
def test_a_full_disk_ends_the_attempt_and_the_run_goes_on_once_there_is_room(
    how: str, seed: int, places: Places, held: Held, tmp_path: Path
) -> None:
    if how == "full disk" and not can_mount():
        pytest.skip("this user may not mount a disk of its own: see the case `writes fail`")
    plan = Plan(seed=seed, limit_s=300, fill_disk=True, **places("sqlite+folder"))
    if how == "full disk":
        plan = replace(plan, disk_mb=6)
    result = run_rig(plan)
    held(plan, result)
    assert result.store_full
    assert all("no space left for runs/" in message for message in result.store_full), result.store_full
    assert result.partial_files == []
    assert result.attempts == 2
