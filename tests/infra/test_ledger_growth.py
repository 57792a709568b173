"""What a training loop asks of the ledger costs as much after many steps as after few.

Measured on SQLite, which plans without statistics: an ORDER BY there can choose an index that walks the whole run.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra_fixtures import LEASE_S, TRAIN, policy, prompts, row, start_run
from sqlalchemy import event

from infra.ledger import Ledger, NewRequest
from sao_core.trajectory import Purpose

BATCH = 4
AHEAD = 12
SHORT, LONG = 12, 96
"""Steps of history."""
WIDER = 1.4
"""Growth that an index's depth explains."""


class Counted:
    """How many instructions SQLite's machine runs for each statement: a measure of work without a clock."""

    def __init__(self, ledger: Ledger) -> None:
        self._statements: list[list[Any]] = []
        event.listen(ledger.engine, "before_cursor_execute", self._begin)

    def of(self, call: Callable[[], Any]) -> dict[str, int]:
        """Statement → instructions of one call."""
        self._statements.clear()
        call()
        counts: dict[str, int] = {}
        for statement, count in self._statements:
            counts[statement] = counts.get(statement, 0) + count
        return counts

    def _begin(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        counter: list[Any] = [" ".join(statement.split()), 0]
        self._statements.append(counter)

        def count() -> int:
            counter[1] += 1
            return 0

        driver: sqlite3.Connection = connection.connection.driver_connection
        driver.set_progress_handler(count, 1)


def loop(ledger: Ledger, run: str, step: int) -> dict[str, Callable[[], Any]]:
    """What flow, workers and learner ask in one step, in their order."""
    version = ledger.next_version(run)
    now = ledger.now()
    requests: list[Any] = []

    def lease() -> None:
        requests.extend(ledger.lease(run, "w", TRAIN, BATCH, LEASE_S, window=AHEAD, attempt=1))

    def commit() -> None:
        ids = [r.trajectory_id for r in ledger.claim(run, step, BATCH)]
        ledger.commit_update(run, step, version - 1, version, {"reward/mean": 0.5}, ids, {}, policy(version))

    return {
        "outstanding": lambda: ledger.outstanding(run),
        "issued": lambda: ledger.prompts_issued(run, Purpose.TRAIN),
        "issue": lambda: ledger.issue(run, prompts(BATCH, first=BATCH * step), frontier=BATCH * (step - 1)),
        "lease": lease,
        "heartbeat": lambda: ledger.heartbeat(run, "w", "running", version - 1, "host", 1, LEASE_S),
        "nothing to lease": lambda: ledger.lease(run, "w", TRAIN, BATCH, LEASE_S, window=AHEAD, attempt=1),
        "newest policy": lambda: ledger.newest_policy(run, announced=True),
        "record": lambda: ledger.record(run, "w", [row(request) for request in requests]),
        "can claim": lambda: ledger.can_claim(run, step, BATCH),
        "rest": lambda: ledger.rest(run, step),
        "claim": lambda: ledger.claim(run, step, BATCH),
        "queue": lambda: ledger.queue(run),
        "rejected": lambda: ledger.rejected_since(run, now),
        "rewards of a prompt": lambda: ledger.prompt_rewards(run, ["prompt-0"], 8),
        "rewards of all": lambda: ledger.recent_rewards(run, 8),
        "policy steps": lambda: ledger.policy_steps(run, version - 1),
        "next version": lambda: ledger.next_version(run),
        "attempt": lambda: ledger.require_attempt(run, 1),
        "commit": commit,
        "checkpoint": lambda: ledger.set_checkpoint(run, step, "checkpoint", "0" * 64, attempt=1),
        "old checkpoints": lambda: ledger.remove_checkpoints(run, 2),
        "evaluated": lambda: ledger.request_states(run, Purpose.EVALUATE, 0),
        "rows of an evaluation": lambda: ledger.evaluation_rows(run, 0),
        "evaluations": lambda: ledger.evaluations(run, 0),
        "unreported": lambda: ledger.unreported_evaluations(run),
        "prune": lambda: ledger.remove_policies(run, keep=2, silent_s=60.0),
        "progress": lambda: ledger.progress(run),
        "updates": lambda: ledger.updates_since(run, step - 1),
        "last update": lambda: ledger.last_update(run),
        "superseded": lambda: ledger.superseded_steps(run),
    }


def test_no_statement_of_the_training_loop_does_more_work_as_the_run_grows(
    migrated_sqlite: Path, tmp_path: Path
) -> None:
    shutil.copy(migrated_sqlite, tmp_path / "ledger.db")
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    counted = Counted(ledger)
    run = start_run(ledger)
    ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=0)])
    measured: dict[int, dict[str, dict[str, int]]] = {}
    for step in range(1, LONG + 1):
        calls = loop(ledger, run, step)
        if step in (SHORT, LONG):
            measured[step] = {name: counted.of(call) for name, call in calls.items()}
        else:
            for call in calls.values():
                call()
    ledger.close()
    grown = {
        f"{name}: {statement}": (few, measured[LONG][name].get(statement, 0))
        for name, statements in measured[SHORT].items()
        for statement, few in statements.items()
        if measured[LONG][name].get(statement, 0) > WIDER * few + 20
    }
    assert not grown
