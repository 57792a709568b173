"""The learner's and the worker's ports: batches out of the ledger, steps into it, resumed without loss."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
from infra_fixtures import LEASE_S, TRAIN, Places, group, prompts, start_run, trajectory

from infra.checkpoints import CheckpointStore
from infra.learner_ports import LedgerBatches, LedgerUpdates
from infra.ledger import Fenced, Ledger, NewRequest, TrajectoryState
from infra.manifest import CorruptFolder
from infra.objects import ObjectMissing, ObjectStore
from infra.policy_store import PolicyStore
from infra.requests import LedgerRequests, new_worker_id
from infra.trajectory_store import TrajectoryStore, TrajectoryWriter
from infra.update_records import read_update_tokens
from sao_core.algorithms import PRESETS
from sao_core.protocols import Batch, UpdateRecord
from sao_core.trajectory import Purpose


class Ports:
    """All ports of one attempt of a run, on scratch folders."""

    def __init__(
        self, places: Places, ledger: Ledger, run: str, tmp: Path, algorithm: str = "sao", batch_size: int = 2
    ) -> None:
        objects = ObjectStore(places.object_store, endpoint_url=places.endpoint_url)
        self.ledger, self.run, self.objects, self.tmp = ledger, run, objects, tmp
        self.attempt = ledger.run(run).attempt
        self.store = TrajectoryStore(objects)
        self.policies = PolicyStore(objects, ledger, places.cache)
        checkpoints = CheckpointStore(objects, ledger, run, places.cache, keep=2, attempt=self.attempt)
        self.updates = LedgerUpdates(ledger, self.policies, checkpoints, run, keep_policies=2, attempt=self.attempt)
        self.batches = LedgerBatches(ledger, self.store, run, PRESETS[algorithm], batch_size, attempt=self.attempt)
        self._folders = 0

    def generate(self, count: int = 99, purposes=TRAIN, **more: object) -> None:
        """Make a rollout for each waiting request."""
        worker = new_worker_id("w")
        source = LedgerRequests(self.ledger, self.run, worker, purposes, LEASE_S, attempt=self.attempt)
        writer = TrajectoryWriter(self.ledger, self.store, self.run, worker)
        for request in source.lease(count):
            writer.put((trajectory(request, **more),))
        writer.close()

    def folder(self, text: str) -> Path:
        self._folders += 1
        path = self.tmp / f"made-{self.attempt}-{self._folders}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text(text)
        return path

    def step(self, step: int, text: str) -> Batch:
        batch = self.batches.claim(step)
        assert batch is not None
        newest = self.ledger.newest_policy(self.run)
        assert newest is not None
        ids = tuple(rollout[0].trajectory_id for rollout in batch.rollouts)
        record = UpdateRecord(step, newest.version, self.updates.next_version(), {"reward/mean": 1.0}, ids)
        self.updates.commit(record, self.folder(text))
        return batch


@pytest.fixture
def ports(places: Places, ledger: Ledger, tmp_path: Path) -> Ports:
    run = f"run-{secrets.token_hex(6)}"
    ledger.create_run(run, "tiny", "sao", {"rollout": {"max_attempts": 2}})
    ledger.begin_attempt(run)
    return Ports(places, ledger, run, tmp_path)


def test_a_batch_is_the_stored_rollouts_and_the_same_if_asked_again(ports: Ports) -> None:
    assert ports.updates.publish_initial(ports.folder("v0"), step=0) == 0
    ports.ledger.issue(ports.run, prompts(3))
    assert ports.batches.claim(1) is None
    ports.generate()
    batch = ports.batches.claim(1)
    assert batch is not None
    assert [rollout[0].request_number for rollout in batch.rollouts] == [0, 1]
    again = ports.batches.claim(1)
    assert again is not None
    for (left,), (right,) in zip(batch.rollouts, again.rollouts, strict=True):
        assert left.behavior_logprobs.tobytes() == right.behavior_logprobs.tobytes()
    assert ports.ledger.queue(ports.run)["ready"] == 1


def test_a_step_publishes_its_policy_and_its_tokens(ports: Ports) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ports.ledger.issue(ports.run, prompts(2))
    ports.generate()
    batch = ports.batches.claim(1)
    assert batch is not None
    ids = tuple(rollout[0].trajectory_id for rollout in batch.rollouts)
    values = np.linspace(-1, 1, 12, dtype=np.float32)
    tokens = {ids[0]: {"values": values, "kept": values > 0}, ids[1]: {"logprobs": -(values**2)}}
    record = UpdateRecord(1, 0, 1, {"reward/mean": 1.0}, ids, tokens=tokens)
    ports.updates.commit(record, ports.folder("v1"))
    assert (ports.policies.feed(ports.run).fetch(1) / "model.safetensors").read_text() == "v1"
    assert ports.policies.feed(ports.run).newest() == 1
    assert ports.batches.policy_steps() == {0: 0, 1: 1}
    stored = read_update_tokens(ports.objects, ports.run, 1)
    assert stored.keys() == set(ids)
    assert stored[ids[0]]["values"].tobytes() == values.tobytes()
    assert stored[ids[0]]["kept"].tolist() == (values > 0).tolist()
    assert stored[ids[1]].keys() == {"logprobs"}
    with pytest.raises(ObjectMissing):
        read_update_tokens(ports.objects, ports.run, 2)


def test_a_damaged_object_is_rejected_counted_and_replaced_in_the_batch(
    ports: Ports, caplog: pytest.LogCaptureFixture
) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ports.ledger.issue(ports.run, prompts(3))
    for _ in range(3):
        ports.generate(1)
    first = ports.ledger.trajectories(ports.run)[0]
    ports.objects.put(first.object_key, b"scratched")
    batch = ports.batches.claim(1)
    assert batch is not None
    assert [rollout[0].request_number for rollout in batch.rollouts] == [1, 2]
    assert batch.rejected == {"object_damaged": 1}
    assert first.object_key in caplog.text
    assert first.sha256 in caplog.text
    rejected = ports.ledger.trajectories(ports.run, states=[TrajectoryState.REJECTED])
    assert [r.trajectory_id for r in rejected] == [first.trajectory_id]
    assert ports.ledger.queue(ports.run)["pending"] == 1


def test_failures_are_reported_with_the_batch_that_they_delayed(ports: Ports) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ports.ledger.issue(ports.run, prompts(4))
    source = LedgerRequests(ports.ledger, ports.run, "w", TRAIN, LEASE_S)
    source.fail(source.lease(1)[0], "sandbox lost: timeout")
    ports.generate()
    first, second = ports.step(1, "v1"), ports.step(2, "v2")
    assert (first.rejected, second.rejected) == ({"sandbox_lost": 1}, {})


def test_running_means_come_with_the_batch(places: Places, ledger: Ledger, tmp_path: Path) -> None:
    for algorithm, expected in (("running-mean", (1.0,)), ("running-mean-global", (1.0, 1.0))):
        run = start_run(ledger)
        ports = Ports(places, ledger, run, tmp_path / algorithm, algorithm)
        ledger.issue(run, [*prompts(2), *prompts(2)])
        ports.generate()
        assert set(ports.step(1, "v1").baselines.values()) == {()}
        batch = ports.batches.claim(2)
        assert batch is not None
        assert batch.baselines == {rollout[0].trajectory_id: expected for rollout in batch.rollouts}


def test_groups_reach_the_learner_whole(places: Places, ledger: Ledger, tmp_path: Path) -> None:
    run = start_run(ledger)
    ports = Ports(places, ledger, run, tmp_path, "grpo", batch_size=4)
    ledger.issue(run, group(7, size=4))
    ports.generate(3)
    assert ports.batches.claim(1) is None
    ports.generate(1)
    batch = ports.batches.claim(1)
    assert batch is not None
    assert {rollout[0].group for rollout in batch.rollouts} == {7}


def test_value_pretraining_reads_every_kept_rollout(ports: Ports) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ports.ledger.issue(ports.run, [NewRequest(Purpose.VALUE_PRETRAIN, f"p{i}") for i in range(5)])
    ports.generate(purposes=[Purpose.VALUE_PRETRAIN])
    assert ports.batches.collected(Purpose.VALUE_PRETRAIN) == 5
    assert [r[0].prompt_key for r in ports.batches.read(Purpose.VALUE_PRETRAIN)] == [f"p{i}" for i in range(5)]


def test_a_resumed_learner_stands_at_its_checkpoint_and_loses_nothing(
    places: Places, ports: Ports, ledger: Ledger, tmp_path: Path
) -> None:
    run = ports.run
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    assert ports.updates.latest_checkpoint() is None
    ledger.issue(run, prompts(8))
    ports.generate()
    ports.step(1, "v1")
    ports.updates.checkpoint(1, ports.folder("state of step 1"))
    ports.updates.flush()
    lost = ports.step(2, "v2")
    ports.batches.claim(3)

    assert ledger.begin_attempt(run) == 2
    again = Ports(places, ledger, run, tmp_path)
    feed = again.policies.feed(run)
    assert feed.newest() is None
    latest = again.updates.latest_checkpoint()
    assert latest is not None
    assert (latest[0], (latest[1] / "model.safetensors").read_text()) == (1, "state of step 1")
    assert (ledger.last_step(run), feed.newest(), again.updates.next_version()) == (1, 1, 3)
    assert ledger.queue(run)["ready"] == 6
    repeated = again.step(2, "v2 again")
    assert [r[0].trajectory_id for r in repeated.rollouts] == [r[0].trajectory_id for r in lost.rollouts]
    assert again.batches.policy_steps() == {0: 0, 1: 1, 2: 1, 3: 2}
    with pytest.raises(Fenced):
        ports.batches.claim(3)
    with pytest.raises(Fenced):
        ports.updates.commit(UpdateRecord(3, 3, 3, {}, ()), ports.folder("clobbered"))
    assert (feed.fetch(3) / "model.safetensors").read_text() == "v2 again"
    again.updates.close()


def test_the_same_initial_policy_is_announced_again_and_not_stored_twice(
    places: Places, ports: Ports, ledger: Ledger, tmp_path: Path
) -> None:
    assert ports.updates.publish_initial(ports.folder("v0"), step=0) == 0
    ledger.begin_attempt(ports.run)
    again = Ports(places, ledger, ports.run, tmp_path)
    assert again.updates.latest_checkpoint() is None
    assert again.updates.publish_initial(again.folder("v0"), step=0) == 0
    assert again.policies.feed(ports.run).newest() == 0
    assert again.objects.keys(f"runs/{ports.run}/policies/1-{again.attempt}") == []
    assert again.updates.publish_initial(again.folder("another"), step=0) == 1


def test_a_learner_that_stalls_while_publishing_cannot_harm_the_policy_of_its_successor(
    places: Places, ports: Ports, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ledger.begin_attempt(ports.run)
    again = Ports(places, ledger, ports.run, tmp_path)
    monkeypatch.setattr(ledger, "require_attempt", lambda *_: None)  # it looked before it stalled
    assert again.updates.publish_initial(again.folder("by the successor"), step=0) == 1
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "next_version", lambda _: 1)
        with pytest.raises(Fenced):
            ports.updates.publish_initial(ports.folder("by the one that stalled"), step=0)
    fetched = again.policies.fetch(ports.run, 1)
    assert (fetched / "model.safetensors").read_text() == "by the successor"


def test_what_was_trained_before_the_first_checkpoint_is_ready_again(
    places: Places, ports: Ports, ledger: Ledger, tmp_path: Path
) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ledger.issue(ports.run, prompts(2))
    ports.generate()
    ports.step(1, "v1")
    ledger.begin_attempt(ports.run)
    again = Ports(places, ledger, ports.run, tmp_path)
    assert again.updates.latest_checkpoint() is None
    assert again.updates.publish_initial(again.folder("v0"), step=0) == 0
    assert (ledger.last_step(ports.run), ledger.queue(ports.run)["ready"]) == (0, 2)


def test_a_worker_holds_only_what_it_knows_of(ports: Ports, ledger: Ledger) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ledger.issue(ports.run, prompts(3))
    worker = new_worker_id("rollout-0")
    source = LedgerRequests(ledger, ports.run, worker, TRAIN, LEASE_S, poll_s=60.0)
    assert [r.number for r in source.lease(2)] == [0, 1]
    ledger.lease(ports.run, worker, TRAIN, 1, 0.0)
    source.heartbeat("generating", 0)
    assert [r.number for r in ledger.lease(ports.run, "other", TRAIN, 9, LEASE_S)] == [2]
    assert source.lease(1) == []
    ledger.issue(ports.run, prompts(1))
    assert source.lease(1) == []
    assert source.release() == 2
    (record,) = ledger.workers(ports.run)
    assert (record.worker, record.state, record.version) == (worker, "stopped", 0)


def test_a_failing_worker_says_why_and_gives_its_rollouts_to_others(ports: Ports, ledger: Ledger) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ledger.issue(ports.run, prompts(1))
    source = LedgerRequests(ledger, ports.run, new_worker_id("rollout-0"), TRAIN, LEASE_S)
    source.lease(1)
    source.report_failure("Traceback: CUDA out of memory")
    (record,) = ledger.workers(ports.run)
    assert (record.state, record.error) == ("failed", "Traceback: CUDA out of memory")
    assert [(r.number, r.attempt) for r in ledger.lease(ports.run, "other", TRAIN, 1, LEASE_S)] == [(0, 2)]


def test_rewound_rollouts_are_marked_so_that_their_age_is_forgiven(ports: Ports, ledger: Ledger) -> None:
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ledger.issue(ports.run, prompts(2))
    ports.generate()
    assert ports.step(1, "v1").rewound == frozenset()
    ledger.rewind(ports.run, 0)
    again = ports.batches.claim(1)
    assert again is not None
    assert again.rewound == {rollout[0].trajectory_id for rollout in again.rollouts}


def test_a_batch_is_claimed_while_other_rollouts_are_in_flight(
    places: Places, ledger: Ledger, run: str, tmp_path: Path
):
    """The learner takes what is complete; it never waits for the slow ones."""
    ports = Ports(places, ledger, run, tmp_path)
    ledger.issue(run, prompts(5))
    slow = LedgerRequests(ledger, run, new_worker_id("slow"), TRAIN, LEASE_S, attempt=ports.attempt)
    assert len(slow.lease(2)) == 2
    ports.generate(3)
    batch = ports.batches.claim(1)
    assert batch is not None
    assert [r[0].request_number for r in batch.rollouts] == [2, 3]
    assert batch.ready == 1


def test_a_learner_whose_successor_has_removed_its_checkpoints_is_fenced_not_told_of_damage(
    places: Places, ports: Ports, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ports.run
    ports.updates.publish_initial(ports.folder("v0"), step=0)
    ports.updates.checkpoint(0, ports.folder("state of step 0"))
    ports.updates.flush()
    seen = ledger.checkpoints(run)
    assert ledger.begin_attempt(run) == 2
    ports.policies.objects.delete_prefix(seen[0].object_key)
    monkeypatch.setattr(Ledger, "checkpoints", lambda self, run_id: seen)
    with pytest.raises(Fenced):
        ports.updates.latest_checkpoint()
    with pytest.raises(CorruptFolder, match="cannot be resumed"):
        Ports(places, ledger, run, tmp_path).updates.latest_checkpoint()
