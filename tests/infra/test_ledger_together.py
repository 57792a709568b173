"""Many at once: worker processes, a learner, kills and rewinds, and what must hold whatever the order."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

from infra_fixtures import LEASE_S, TRAIN, Places, group, make, policy, prompts, row, start_run, train
from sqlalchemy import event

from infra.ledger import Ledger, RequestState, TrajectoryState
from sao_core.trajectory import Outcome, Purpose

SETTLED = {RequestState.DONE, RequestState.EXHAUSTED, RequestState.CANCELLED}


def serve(url: str, run: str, worker: str, done: Any) -> None:
    """A worker process: leases, beats and records until told to stop; dies loudly of any error."""
    ledger = Ledger(url)
    while not done.is_set():
        requests = ledger.lease(run, worker, TRAIN, 4, LEASE_S)
        ledger.heartbeat(run, worker, "generating", 0, "host", 1, LEASE_S)
        ledger.record(run, worker, [row(request) for request in requests])


def test_workers_and_a_learner_share_one_ledger(places: Places) -> None:
    ledger = Ledger(places.database_url)
    run = start_run(ledger)
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    workers = [context.Process(target=serve, args=(places.database_url, run, f"w{i}", done)) for i in range(2)]
    for process in workers:
        process.start()
    batch, steps, step = 8, 10, 1
    deadline = time.monotonic() + 60
    while step <= steps and time.monotonic() < deadline:
        missing = 2 * batch - ledger.outstanding(run)
        ledger.issue(run, prompts(missing))
        rows = ledger.claim(run, step, batch)
        if rows:
            ledger.commit_update(run, step, step - 1, step, {}, [r.trajectory_id for r in rows], {}, policy(step))
            step += 1
    done.set()
    for process in workers:
        process.join(30)
    assert [process.exitcode for process in workers] == [0, 0]
    trained = ledger.trajectories(run, states=[TrajectoryState.TRAINED])
    assert Counter(r.trained_step for r in trained) == dict.fromkeys(range(1, steps + 1), batch)
    assert len({r.request_number for r in trained}) == steps * batch


def test_whatever_the_order_nothing_is_lost_or_trained_twice(ledger: Ledger) -> None:
    """A random walk over every operation, with late records, expired leases, failures, groups and rewinds."""
    for seed in range(2):
        dice = random.Random(seed)
        run = start_run(ledger, max_attempts=3)
        held: list[tuple[str, Any]] = []
        accepted: set[str] = set()
        issued = groups = 0
        for turn in range(150):
            move = dice.choice(
                ["issue", "group", "lease", "lease", "record", "record", "fail", "train", "train", "odd"]
            )
            worker = f"w{dice.randrange(3)}"
            step = ledger.last_step(run) + 1
            if move == "issue":
                issued += len(ledger.issue(run, prompts(dice.randrange(1, 5))))
            elif move == "group":
                issued += len(ledger.issue(run, group(groups, size=3)))
                groups += 1
            elif move == "lease":
                lease_s = dice.choice([0.0, LEASE_S, LEASE_S])
                held += [(worker, r) for r in ledger.lease(run, worker, TRAIN, dice.randrange(1, 4), lease_s)]
            elif move == "record" and held:
                chosen = dice.sample(held, min(len(held), dice.randrange(1, 4)))
                mine = [(name, r) for name, r in chosen if name == chosen[0][0]]
                outcome = dice.choice([Outcome.COMPLETED, Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.FAILED])
                rows = [row(r, outcome=outcome) for _, r in mine]
                names = ledger.record(run, mine[0][0], rows)
                assert ledger.record(run, mine[0][0], rows) == names
                accepted |= set(names)
            elif move == "fail" and held:
                name, request = held.pop(dice.randrange(len(held)))
                ledger.fail_attempt(run, name, request.number, request.attempt, "crash")
            elif move == "train":
                before = ledger.newest_policy(run)
                rows = ledger.claim(run, step, 3)
                if rows and before is not None:
                    why = {rows[-1].trajectory_id: "stale"} if dice.random() < 0.2 else {}
                    ids = [r.trajectory_id for r in rows if r.trajectory_id not in why]
                    version = ledger.next_version(run)
                    ledger.commit_update(run, step, before.version, version, {}, ids, why, policy(version))
            elif move == "odd":
                odd = dice.choice(["rewind", "begin", "release", "expire"])
                if odd == "rewind" and step > 2:
                    ledger.rewind(run, dice.randrange(step - 2, step))
                elif odd == "begin":
                    ledger.begin_attempt(run)
                elif odd == "release":
                    ledger.release(run, worker)
                else:
                    ledger.expire(run, worker)
            if turn % 15 == 14:
                check(ledger, run, issued, accepted)


def check(ledger: Ledger, run: str, issued: int, accepted: set[str]) -> None:
    rows = ledger.trajectories(run)
    assert {r.trajectory_id for r in rows} == accepted
    standing = [r for r in rows if r.state is not TrajectoryState.REJECTED]
    assert len({r.request_number for r in standing}) == len(standing)
    states = ledger.request_states(run, Purpose.TRAIN)
    assert sum(states.values()) == issued
    steps = [u.step for u in ledger.updates_since(run, 0)]
    assert steps == list(range(1, ledger.last_step(run) + 1))
    trained = Counter(r.trained_step for r in rows if r.state is TrajectoryState.TRAINED)
    assert trained == {u.step: u.num_trajectories for u in ledger.updates_since(run, 0) if u.num_trajectories}
    for r in rows:
        assert (r.state is TrajectoryState.TRAINED) == (r.trained_step is not None)
        assert (r.reject_reason is not None) == (r.state is TrajectoryState.REJECTED)
    queue = ledger.queue(run)
    assert ledger.outstanding(run) == sum(queue.values())
    done = {r.request_number for r in standing}
    assert states.get(RequestState.DONE, 0) >= len(done)
    open_requests = sum(n for state, n in states.items() if state not in SETTLED)
    assert open_requests == queue["pending"] + queue["leased"]


def test_no_statement_of_a_step_reads_a_whole_table(tmp_path: Path) -> None:
    """On SQLite, whose planner says what it does: every access goes through an index, so nothing grows with the run."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    run = start_run(ledger)
    statements: dict[str, Any] = {}

    @event.listens_for(ledger.engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")) and not many:
            statements[statement] = parameters

    for step in (1, 2):
        ledger.issue(run, [*prompts(2), *group(step, size=2)], frontier=None)
        ledger.outstanding(run)
        make(ledger, run, 4)
        ledger.lease(run, "w", TRAIN, 1, LEASE_S)
        ledger.heartbeat(run, "w", "generating", 0, "host", 1, LEASE_S, purposes=TRAIN)
        ledger.can_claim(run, step, 4)
        ids = train(ledger, run, step, 4)
        assert len(ids) == 4
        ledger.queue(run)
        ledger.progress(run)
        ledger.newest_policy(run, announced=True)
        ledger.policy_steps(run, step)
        ledger.recent_rewards(run, 8)
        ledger.prompt_rewards(run, ["prompt-0"], 8)
        ledger.rejected_since(run, ledger.now())
        ledger.updates_since(run, step - 1)
        ledger.last_update(run)
        ledger.unreported_evaluations(run)
        ledger.remove_policies(run, 1, 60.0)
        ledger.set_checkpoint(run, step, "k", "0" * 64)
        ledger.remove_checkpoints(run, 1)
        ledger.lengths(run, 100)
    assert len(statements) > 30
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        for statement, parameters in statements.items():
            plan = [line[3] for line in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            scans = [step for step in plan if step.startswith("SCAN") and "CONSTANT ROW" not in step]
            assert scans == [], statement
