"""Trajectories on disk: bit for bit, small, checked; and the writer that brings them there."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from infra_fixtures import LEASE_S, TRAIN, Places, prompts, row, segments, trajectory

from infra.ledger import Ledger, TrajectoryState
from infra.objects import ObjectStore
from infra.trajectory_format import encode, row_sha256
from infra.trajectory_store import CorruptObject, TrajectoryStore, TrajectoryWriter
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import InvalidTrajectory, Outcome, Purpose, Trajectory

REQUEST = RolloutRequest("r", 3, 1, Purpose.TRAIN, "prompt-3", group=4)


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for field in fields(Trajectory):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, left.tobytes()) == (right.dtype, right.tobytes()), field.name
        else:
            assert left == right, field.name


@pytest.fixture
def store(objects: ObjectStore) -> TrajectoryStore:
    return TrajectoryStore(objects)


def test_every_field_comes_back_bit_for_bit(store: TrajectoryStore) -> None:
    rollouts = [(trajectory(replace(REQUEST, number=n)),) for n in range(70)]
    rollouts.append(segments(replace(REQUEST, number=70, group=None), 3))
    rows = store.write("runs/r/trajectories/a.parquet", rollouts)
    assert [r.object_row for r in rows] == list(range(73))
    back = store.read(list(reversed(rows)))
    assert [len(rollout) for rollout in back] == [1] * 70 + [3]
    for before, after in zip(rollouts, back, strict=True):
        for left, right in zip(before, after, strict=True):
            assert_same(left, right)
    assert_same(store.read(rows[66:67])[0][0], rollouts[66][0])


def test_log_probabilities_are_exact_to_the_bit(store: TrajectoryStore) -> None:
    special = np.array([-0.0, -1e-45, -np.float32(1) / 3, -88.7, -3.4e38, 0.0], np.float32)
    one = trajectory(REQUEST, tokens=6, action_mask=np.ones(6, bool), behavior_logprobs=special)
    one = replace(one, policy_versions=np.zeros(6, np.int32))
    (back,) = store.read(store.write("x.parquet", [(one,)]))[0]
    assert back.behavior_logprobs.tobytes() == special.tobytes()


def test_a_long_trajectory_takes_at_most_eight_bytes_per_token() -> None:
    tokens = 100_000
    generator = np.random.default_rng(0)
    worst = trajectory(
        REQUEST,
        tokens=tokens,
        token_ids=generator.integers(0, 151_000, tokens).astype(np.int32),
        action_mask=np.ones(tokens, bool),
        behavior_logprobs=-generator.exponential(1.0, tokens).astype(np.float32),
        policy_versions=np.arange(tokens, dtype=np.int32) // 9_000,
    )
    assert len(encode([worst])) / tokens <= 6.0


def test_the_hash_covers_the_arrays_in_their_documented_order() -> None:
    one = trajectory(REQUEST)
    parts = (one.token_ids, one.action_mask, one.behavior_logprobs, one.policy_versions, one.rewards)
    assert row_sha256(one) == hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
    changed = one.behavior_logprobs.copy()
    changed[-1] = np.nextafter(changed[-1], np.float32(-np.inf))
    assert row_sha256(replace(one, behavior_logprobs=changed)) != row_sha256(one)


def test_duckdb_reads_what_is_stored(tmp_path: Path) -> None:
    store = TrajectoryStore(ObjectStore(str(tmp_path)))
    store.write("runs/r/trajectories/w/1.parquet", [(trajectory(REQUEST),)])
    query = f"""
        SELECT prompt_key, outcome, len(token_ids), list_sum(rewards), messages[2].content, sampling.temperature
        FROM '{tmp_path}/runs/*/trajectories/*/*.parquet'
    """
    assert duckdb.sql(query).fetchall() == [("prompt-3", "completed", 12, 1.0, "6", 1.0)]


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "exchanged"])
def test_a_damaged_object_is_named_with_its_hash_and_the_others_are_read(store: TrajectoryStore, damage: str) -> None:
    good = store.write("good.parquet", [(trajectory(REQUEST),)])
    other = trajectory(replace(REQUEST, number=4))
    bad = store.write("bad.parquet", [(other,)])
    data = store.objects.get("bad.parquet")
    if damage == "missing":
        store.objects.delete("bad.parquet")
    elif damage == "cut":
        store.objects.put("bad.parquet", data[: len(data) // 2])
    elif damage == "flipped":
        middle = data.index(b"PAR1") + 200
        store.objects.put("bad.parquet", data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
    else:
        store.write("bad.parquet", [(trajectory(replace(REQUEST, number=4), seed=5),)])
    rollouts, damaged = store.read_intact([*good, *bad])
    assert [rollout[0].request_number for rollout in rollouts] == [3]
    assert list(damaged) == [other.trajectory_id]
    with pytest.raises(CorruptObject, match=f"bad.parquet.*{bad[0].sha256}"):
        store.read([*good, *bad])


def test_one_damaged_segment_sets_the_whole_rollout_aside(store: TrajectoryStore) -> None:
    rows = store.write("a.parquet", [segments(REQUEST, 2)])
    rollouts, damaged = store.read_intact([rows[0], replace(rows[1], sha256="0" * 64)])
    assert (rollouts, list(damaged)) == ([], [rows[1].trajectory_id])


# --- the writer ---------------------------------------------------------------------------------


def leased(ledger: Ledger, run: str, count: int, lease_s: float = LEASE_S) -> list[RolloutRequest]:
    ledger.issue(run, prompts(count))
    return ledger.lease(run, "w", TRAIN, count, lease_s)


def test_what_is_flushed_is_stored_and_recorded(ledger: Ledger, store: TrajectoryStore, run: str) -> None:
    requests = leased(ledger, run, 3)
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=60.0)
    put = [(trajectory(request),) for request in requests]
    for rollout in put:
        writer.put(rollout)
    assert ledger.queue(run)["ready"] == 0
    writer.flush(wait=True)
    rows = ledger.trajectories(run)
    assert {r.object_key for r in rows} == {rows[0].object_key}
    assert rows[0].object_key.startswith(f"runs/{run}/trajectories/w/")
    for before, (after,) in zip(put, store.read(rows), strict=True):
        assert_same(before[0], after)
    assert [(r.score, r.difficulty, r.num_turns, r.num_action_tokens) for r in rows] == [(1.0, "2", 1, 6)] * 3
    writer.close()
    assert (writer.recorded, writer.refused) == (3, 0)


def test_a_finished_rollout_is_durable_within_the_flush_interval(
    ledger: Ledger, store: TrajectoryStore, run: str
) -> None:
    (request,) = leased(ledger, run, 1)
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=0.05)
    writer.put((trajectory(request),))
    deadline = time.monotonic() + 10
    while not ledger.queue(run)["ready"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ledger.queue(run)["ready"] == 1
    writer.close()


def test_closing_stores_the_rest(ledger: Ledger, store: TrajectoryStore, run: str) -> None:
    (request,) = leased(ledger, run, 1)
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=60.0)
    writer.put((trajectory(request),))
    writer.close()
    assert ledger.queue(run)["ready"] == 1


def test_a_rollout_after_its_lease_is_refused_and_leaves_no_object(
    ledger: Ledger, store: TrajectoryStore, run: str
) -> None:
    (late,) = leased(ledger, run, 1, lease_s=0.0)
    ledger.lease(run, "other", TRAIN, 1, LEASE_S)
    writer = TrajectoryWriter(ledger, store, run, "w")
    writer.put((trajectory(late),))
    writer.flush(wait=True)
    writer.close()
    assert (writer.recorded, writer.refused) == (0, 1)
    assert ledger.trajectories(run) == []
    assert store.objects.keys(f"runs/{run}/trajectories") == []


def test_a_failed_rollout_is_stored_for_analysis(ledger: Ledger, store: TrajectoryStore, run: str) -> None:
    (request,) = leased(ledger, run, 1)
    writer = TrajectoryWriter(ledger, store, run, "w")
    writer.put((trajectory(request, outcome=Outcome.FAILED, stop_reason="sandbox lost"),))
    writer.close()
    (failed,) = ledger.trajectories(run)
    assert (failed.state, failed.reject_reason) == (TrajectoryState.REJECTED, "sandbox_lost")
    assert store.read([failed])[0][0].outcome is Outcome.FAILED


def test_an_invalid_trajectory_is_refused_at_once(ledger: Ledger, store: TrajectoryStore, run: str) -> None:
    (request,) = leased(ledger, run, 1)
    writer = TrajectoryWriter(ledger, store, run, "w")
    with pytest.raises(InvalidTrajectory, match="must sum to the score"):
        writer.put((trajectory(request, score=2.0),))
    writer.close()
    assert ledger.trajectories(run) == []


def test_the_object_is_complete_before_the_ledger_knows_of_it(
    places: Places, ledger: Ledger, store: TrajectoryStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,) = leased(ledger, run, 1)
    seen: list[Any] = []
    record = ledger.record

    def watched(run_id: str, worker: str, rows: Any) -> list[str]:
        seen.extend(TrajectoryStore(store.objects).read(rows))
        return record(run_id, worker, rows)

    monkeypatch.setattr(ledger, "record", watched)
    writer = TrajectoryWriter(ledger, store, run, "w")
    writer.put((trajectory(request),))
    writer.close()
    assert len(seen) == 1


def test_a_failure_of_the_store_reaches_the_loop_that_puts(
    ledger: Ledger, store: TrajectoryStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = leased(ledger, run, 2)
    monkeypatch.setattr(store.objects, "put", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=60.0)
    writer.put((trajectory(requests[0]),))
    with pytest.raises(OSError, match="the disk is gone"):
        writer.flush(wait=True)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.put((trajectory(requests[1]),))
    assert ledger.trajectories(run) == []


def test_memory_is_bounded_while_the_store_is_slow(
    ledger: Ledger, store: TrajectoryStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = leased(ledger, run, 6)
    gate = threading.Event()
    put = store.objects.put

    def slow(key: str, data: bytes) -> None:
        gate.wait(30)
        put(key, data)

    monkeypatch.setattr(store.objects, "put", slow)
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=0.0, max_buffered_tokens=24)
    done: list[int] = []

    def loop() -> None:
        for request in requests:
            writer.put((trajectory(request),))
            done.append(request.number)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert len(done) <= 4
    gate.set()
    thread.join(30)
    writer.close()
    assert writer.recorded == 6
    assert row(requests[0]).trajectory_id in {r.trajectory_id for r in ledger.trajectories(run)}
