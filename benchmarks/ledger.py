"""The ledger under many workers: leases and records per second, their latencies, and whether anything found it locked.

1, 4 and 16 worker processes lease eight requests, record eight finished rollouts in one durable transaction, and start
over, on SQLite and on Postgres; beside them a learner claims and commits steps. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
from given.rollouts import LEASE_S, issued, new_run, trajectory
from given.services import postgres

from infra.ledger import Ledger, NewPolicy, TrajectoryRow
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Purpose

WORKERS = (1, 4, 16)
PER_CALL = 8
BATCH = 64
TRAIN = (Purpose.TRAIN,)
IDLE_S = 0.002


class Locked(logging.Handler):
    """Counts warnings of the ledger that the database was locked."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one warning."""
        self.count += "locked" in record.getMessage()


@contextmanager
def counted_locks() -> Iterator[Locked]:
    locked = Locked()
    logger = logging.getLogger("infra.ledger.database")
    logger.addHandler(locked)
    yield locked
    logger.removeHandler(locked)


class Worker:
    """What a rollout worker asks of the ledger."""

    def __init__(self, database_url: str, run_id: str, worker: str) -> None:
        self._ledger = Ledger(database_url)
        self._run_id = run_id
        self._worker = worker
        self._template: TrajectoryRow | None = None
        self.latencies: dict[str, list[float]] = {"lease": [], "record": []}

    def turn(self) -> None:
        """Lease, and record what was leased."""
        started = time.perf_counter()
        requests = self._ledger.lease(self._run_id, self._worker, TRAIN, PER_CALL, LEASE_S)
        if not requests:
            time.sleep(IDLE_S)
            return
        self.latencies["lease"].append(time.perf_counter() - started)
        rows = [self._row(request, requests[0].number, row) for row, request in enumerate(requests)]
        started = time.perf_counter()
        self._ledger.record(self._run_id, self._worker, rows)
        self.latencies["record"].append(time.perf_counter() - started)

    def _row(self, request: RolloutRequest, first: int, row: int) -> TrajectoryRow:
        if self._template is None:
            made = trajectory(request, 100, np.random.default_rng(0))
            self._template = TrajectoryRow.of(made, "", 0, "0" * 64)
        return replace(
            self._template,
            trajectory_id=f"{request.run_id}-{request.number}-{request.attempt}-0",
            request_number=request.number,
            attempt=request.attempt,
            prompt_key=request.prompt_key,
            object_key=f"{self._worker}/{first}",
            object_row=row,
        )


def work(database_url: str, run_id: str, name: str, parent: Connection) -> None:
    """A worker process: warm, ready, go; then its latencies."""
    worker = Worker(database_url, run_id, name)
    with counted_locks() as locked:
        worker.turn()  # the first statements are compiled
        for seconds in worker.latencies.values():
            seconds.clear()
        parent.send("ready")
        deadline = time.monotonic() + parent.recv()
        while time.monotonic() < deadline:
            worker.turn()
    parent.send((worker.latencies, locked.count))


def learn(ledger: Ledger, run_id: str, seconds: float, ahead: int) -> list[float]:
    """Claim, commit and issue, as flow and learner do; how long each commit took."""
    deadline, step, commits = time.monotonic() + seconds, 0, []
    while time.monotonic() < deadline:
        missing = ahead - ledger.outstanding(run_id)
        if missing > 0:
            issued(ledger, run_id, missing)
        rows = ledger.claim(run_id, step + 1, BATCH)
        if not rows:
            time.sleep(IDLE_S)
            continue
        step += 1
        started = time.perf_counter()
        policy = NewPolicy(step, f"policies/{step}", "0" * 64)
        trained = [row.trajectory_id for row in rows]
        ledger.commit_update(run_id, step, step - 1, step, {"reward/mean": 1.0}, trained, {}, policy)
        commits.append(time.perf_counter() - started)
    return commits


def measure(database: str, database_url: str, workers: int, seconds: float) -> dict[str, Any]:
    ledger = Ledger(database_url)
    run_id = new_run(ledger)
    ahead = 4 * BATCH + 2 * workers * PER_CALL
    issued(ledger, run_id, ahead)
    processes = multiprocessing.get_context("spawn")
    lines = []
    children = []
    for index in range(workers):
        ours, theirs = processes.Pipe()
        child = processes.Process(target=work, args=(database_url, run_id, f"worker-{index}", theirs))
        child.start()
        lines.append(ours)
        children.append(child)
    for line in lines:
        line.recv()
    for line in lines:
        line.send(seconds)
    with counted_locks() as locked:
        commits = learn(ledger, run_id, seconds, ahead)
    results = [line.recv() for line in lines]
    for child in children:
        child.join()
    ledger.close()
    leases, records = ([s for latencies, _ in results for s in latencies[name]] for name in ("lease", "record"))
    return {
        "benchmark": "ledger",
        "database": database,
        "workers": workers,
        "rollouts_per_call": PER_CALL,
        "leases_per_s": round(len(leases) / seconds, 1),
        "records_per_s": round(len(records) / seconds, 1),
        "rollouts_per_s": round(PER_CALL * len(records) / seconds),
        "lease_ms": percentiles(leases),
        "record_ms": percentiles(records),
        "steps_per_s": round(len(commits) / seconds, 1),
        "commit_ms": percentiles(commits),
        "locked": locked.count + sum(count for _, count in results),
    }


def percentiles(seconds: list[float]) -> list[float] | None:
    """p50 and p95 in milliseconds."""
    return [round(1000 * median(seconds), 2), round(1000 * float(np.quantile(seconds, 0.95)), 2)] if seconds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, postgres() as postgres_url:
        for database, url in (("sqlite", f"sqlite:///{folder}/ledger.db"), ("postgres", postgres_url)):
            for workers in arguments.workers:
                print(json.dumps(measure(database, url, workers, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
