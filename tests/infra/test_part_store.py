"""Parts of unfinished rollouts as objects, their way there, and a worker that goes on from them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from infra_fixtures import LEASE_S, TRAIN, prompts, trajectory
from part_fixtures import begin, lease, part, states

from infra.ledger import Ledger, PartRow, PartState, TrajectoryState
from infra.objects import ObjectStore
from infra.requests import LedgerRequests
from infra.rollout_parts import CorruptPart, read_parts, write_part
from infra.trajectory_store import TrajectoryStore, TrajectoryWriter
from sao_core.config import RolloutConfig
from sao_core.environments.calculator import Calculator, CalculatorOptions, CalculatorTasks
from sao_core.models.tiny import build_tokenizer
from sao_core.protocols import RolloutRequest
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.engine import EngineStats, Sampled, StopReason
from sao_core.rollout.parts import RolloutPart, join
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import ARRAY_FIELDS, Outcome, validate_rollout


@pytest.fixture
def store(objects: ObjectStore) -> TrajectoryStore:
    return TrajectoryStore(objects)


def wait_for_parts(ledger: Ledger, run: str, count: int) -> list[PartRow]:
    deadline = time.monotonic() + 20
    while len(rows := ledger.parts(run)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(rows) == count
    return rows


def assert_same(a: RolloutPart, b: RolloutPart) -> None:
    assert replace(a, pieces=()) == replace(b, pieces=())
    assert len(a.pieces) == len(b.pieces)
    for left, right in zip(a.pieces, b.pieces, strict=True):
        for name in ARRAY_FIELDS:
            mine, theirs = getattr(left, name), getattr(right, name)
            assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())
        none = dict.fromkeys(ARRAY_FIELDS, np.zeros(0))
        assert repr(replace(left, **none)) == repr(replace(right, **none))


def test_a_part_comes_back_bit_for_bit_and_a_damaged_one_is_named(
    ledger: Ledger, objects: ObjectStore, run: str
) -> None:
    request = begin(ledger, run)
    two = part(request)
    two = replace(two, pieces=(*two.pieces, replace(two.pieces[0], segment=1, messages=())))
    kept = [write_part(objects, "w", one) for one in (two, part(request, 1, state=None))]
    assert [(r.part, r.restorable, r.num_tokens) for r in kept] == [(0, True, 24), (1, False, 12)]
    for before, after in zip((two, part(request, 1, state=None)), read_parts(objects, kept), strict=True):
        assert_same(before, after)
    data = objects.get(kept[1].object_key)
    objects.put(kept[1].object_key, data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(CorruptPart, match=f"part 1 of request 0 damaged: {kept[1].object_key}.*{kept[1].sha256}"):
        read_parts(objects, kept)
    objects.delete(kept[0].object_key)
    with pytest.raises(CorruptPart, match=f"part 0 of request 0 damaged: {kept[0].object_key}"):
        read_parts(objects, kept)


def test_a_part_is_durable_at_once_and_its_object_goes_with_the_record(
    ledger: Ledger, store: TrajectoryStore, run: str
) -> None:
    request = begin(ledger, run)
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=60.0)
    assert writer.put_part(part(request))
    assert writer.put_part(part(request, 1))
    rows = wait_for_parts(ledger, run, 2)
    assert_same(read_parts(store.objects, rows)[1], part(request, 1))
    assert rows[0].object_key.startswith(f"runs/{run}/parts/w/0-1-0000-")
    writer.put((trajectory(request),))
    writer.close()
    assert ledger.parts(run) == []
    assert store.objects.keys(f"runs/{run}/parts") == []
    assert [t.state for t in ledger.trajectories(run)] == [TrajectoryState.READY]


def test_a_part_that_is_put_just_before_the_whole_goes_first(
    ledger: Ledger, store: TrajectoryStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begin(ledger, run)
    gate, accepted = threading.Event(), []
    put, record_part = store.objects.put, ledger.record_part
    monkeypatch.setattr(store.objects, "put", lambda *a, **k: (gate.wait(30), put(*a, **k)))
    monkeypatch.setattr(ledger, "record_part", lambda *a: accepted.append(record_part(*a)) or accepted[-1])
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=0.001)
    for number in range(5):
        writer.put_part(part(request, number))
    writer.put((trajectory(request),))
    time.sleep(0.05)  # so that the whole is due
    gate.set()
    writer.close()
    assert accepted == [True] * 5
    assert (writer.recorded, ledger.parts(run)) == (1, [])
    assert store.objects.keys(f"runs/{run}/parts") == []


def test_a_part_after_its_lease_leaves_no_object_and_no_harm(ledger: Ledger, store: TrajectoryStore, run: str) -> None:
    request = begin(ledger, run, lease_s=0.0)
    lease(ledger, run, "other")
    writer = TrajectoryWriter(ledger, store, run, "w")
    assert writer.put_part(part(request))
    writer.flush(wait=True)
    writer.close()
    assert ledger.parts(run) == []
    assert store.objects.keys(f"runs/{run}/parts") == []


def test_parts_count_in_what_is_buffered_and_putting_one_never_waits(
    ledger: Ledger, store: TrajectoryStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begin(ledger, run)
    gate = threading.Event()
    put = store.objects.put
    monkeypatch.setattr(store.objects, "put", lambda *a, **k: (gate.wait(30), put(*a, **k)))
    writer = TrajectoryWriter(ledger, store, run, "w", flush_interval_s=0.0, max_buffered_tokens=24)
    started = time.monotonic()
    assert writer.put_part(part(request, 0))
    while writer._buffered_tokens:
        time.sleep(0.001)  # until the writer is at the first part
    taken = [writer.put_part(part(request, number)) for number in (1, 2, 3, 3, 3)]
    assert taken == [True, True, False, False, False]
    assert time.monotonic() - started < 10
    gate.set()
    writer.flush(wait=True)
    assert writer.put_part(part(request, 3))
    writer.close()
    assert [p.part for p in ledger.parts(run)] == [0, 1, 2, 3]


def test_a_failure_to_store_a_part_reaches_the_loop_that_puts(
    ledger: Ledger, store: TrajectoryStore, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begin(ledger, run)
    monkeypatch.setattr(store.objects, "put", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    writer = TrajectoryWriter(ledger, store, run, "w")
    writer.put_part(part(request))
    with pytest.raises(OSError, match="the disk is gone"):
        writer.flush(wait=True)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.put_part(part(request, 1))


def test_damaged_parts_are_reported_and_none_is_given(
    ledger: Ledger, store: TrajectoryStore, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = begin(ledger, run)
    writer = TrajectoryWriter(ledger, store, run, "w")
    writer.put_part(part(request))
    (stored,) = wait_for_parts(ledger, run, 1)
    assert len(writer.parts(request)) == 1
    store.objects.put(stored.object_key, b"something else")
    with caplog.at_level(logging.ERROR):
        assert writer.parts(request) == ()
    assert f"damaged: {stored.object_key} (sha256 {stored.sha256})" in caplog.text
    writer.give_up_parts(request)
    writer.close()
    assert states(ledger, run) == [(1, 0, PartState.FAILED)]
    assert store.objects.exists(stored.object_key)


# --- a worker that dies ---------------------------------------------------------------------------

TOKENIZER = build_tokenizer()
OPTIONS = CalculatorOptions()
LIMITS = RolloutConfig(max_action_tokens=200, max_context_tokens=512, partial_after_s=1e-9)


class Stretches:
    """An engine of one session that says the given stretches under one version; then it never answers."""

    slots, room = 1, 500

    def __init__(self, version: int, stretches: list[list[int]]) -> None:
        self.version, self.stretches, self.stats = version, stretches, EngineStats()
        self.silent = asyncio.Event()

    def open(self, sampling: Any, seed: int) -> Stretches:
        return self

    async def extend_and_sample(
        self, new_ids: Sequence[int], stop_ids: Set[int], max_new_tokens: int, deadline: float | None = None
    ) -> Sampled:
        if not self.stretches:
            self.silent.set()
            await asyncio.Event().wait()
        ids = np.array(self.stretches.pop(0), np.int32)
        reason = StopReason.STOP_TOKEN if ids[-1] in stop_ids else StopReason.DEADLINE
        logprobs = np.full(len(ids), -0.25 * self.version, np.float32)
        return Sampled(ids, logprobs, np.full(len(ids), self.version, np.int32), reason)

    def restart(self) -> None: ...

    def close(self) -> None: ...


def said(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]


def serve(request: RolloutRequest, engine: Stretches, writer: TrajectoryWriter, task: Any, dies: bool) -> None:
    """Make the rollout of a request as a worker does, or be gone in the middle of it."""

    async def work() -> None:
        begun = join(writer.parts(request)) if request.parts else None
        rollout = asyncio.ensure_future(
            run_rollout(
                request,
                engine,  # type: ignore[arg-type]
                Calculator(OPTIONS),
                task,
                Renderer(TOKENIZER),
                LIMITS,
                environment_name="calculator",
                seed=0,
                begun=begun,
                put_part=writer.put_part,
            )
        )
        if dies:
            await engine.silent.wait()
            rollout.cancel()
        else:
            writer.put(await rollout)

    asyncio.run(asyncio.wait_for(work(), 30))
    writer.flush(wait=True)


def test_another_worker_finishes_what_a_dead_one_began(ledger: Ledger, store: TrajectoryStore, run: str) -> None:
    ledger.issue(run, prompts(1))
    task = CalculatorTasks(OPTIONS, seed=0).task("train/1")
    call, answer = said("calc: 1+2-3*4+5"), said(f"answer: {task.data['result']}")
    first = LedgerRequests(ledger, run, "first", TRAIN, 0.5)
    second = LedgerRequests(ledger, run, "second", TRAIN, LEASE_S)
    (old,) = first.lease(1)
    dead = TrajectoryWriter(ledger, store, run, "first", flush_interval_s=0.01)
    serve(old, Stretches(3, [call[:4], call[4:], answer[:1], answer[1:-1]]), dead, task, dies=True)
    parts = ledger.parts(run)
    assert [p.restorable for p in parts] == [True] * len(parts)
    assert len(parts) == 3
    begun = join(read_parts(store.objects, parts)).segments[0]
    time.sleep(0.6)
    (new,) = second.lease(1)
    assert (new.attempt, new.parts) == (2, 3)
    writer = TrajectoryWriter(ledger, store, run, "second", flush_interval_s=0.01)
    serve(new, Stretches(5, [answer[-2:]]), writer, task, dies=False)
    dead.put((trajectory(old),))
    dead.close()
    writer.close()
    (done,) = ledger.trajectories(run)
    (rollout,) = store.read([done])
    validate_rollout(rollout)
    t = rollout[0]
    assert (t.attempt, t.outcome, t.score, done.state) == (2, Outcome.COMPLETED, 1.0, TrajectoryState.READY)
    for name in ARRAY_FIELDS:
        assert getattr(t, name)[: begun.num_tokens].tobytes() == getattr(begun, name).tobytes()
    actions = t.token_ids[t.action_mask].tolist()
    assert actions == call + answer
    assert t.policy_versions[t.action_mask].tolist() == [3] * (len(actions) - 2) + [5] * 2
    assert t.reward_parts == {"correct": 1.0, "calls": 1.0, "malformed": 0.0}
    assert (dead.refused, ledger.parts(run), store.objects.keys(f"runs/{run}/parts")) == (1, [], [])
