"""A run in which everything happened that can happen, made through the ports that learner and workers use.

Steps 1 … 4 of two rollouts each survive; step 2 was undone once. Requests, by number:

    0, 1   kept for value pretraining          7      its rollout failed, then trained
    2      evaluation of version 0             8      its first attempt failed, then trained
    3, 4   group 7, trained by step 1          9      refused by step 4 as stale; its second attempt is ready
    5      two segments, trained by step 2     10     exhausted, with two parts of its last attempt
    6      trained by step 2                   11     trained by step 4; 12 ready; 13, 14 cancelled
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from infra_fixtures import LEASE_S, Places, group, prompts, segments, trajectory

from infra.checkpoints import CheckpointStore
from infra.learner_ports import LedgerBatches, LedgerUpdates
from infra.ledger import Ledger, NewRequest
from infra.objects import ObjectStore
from infra.policy_store import PolicyStore
from infra.requests import LedgerRequests, new_worker_id
from infra.rollout_parts import write_part
from infra.trajectory_store import TrajectoryStore, TrajectoryWriter
from sao_core.algorithms import PRESETS
from sao_core.config import parse_config
from sao_core.protocols import Rollout, RolloutRequest, UpdateRecord
from sao_core.rollout.parts import UNFINISHED, RolloutPart
from sao_core.trajectory import Outcome, Purpose

UPDATES = 4
EVERYTHING = tuple(Purpose)
CONFIG = parse_config({"recipe": "tiny", "learner": {"updates": UPDATES}, "rollout": {"max_attempts": 3}})


class Maker:
    """Learner and worker of one attempt of a run, with weights that are a few bytes."""

    def __init__(
        self,
        places: Places,
        ledger: Ledger,
        objects: ObjectStore,
        run: str,
        tmp: Path,
        *,
        keep_policies: int | None = None,
    ) -> None:
        self.ledger, self.objects, self.run, self.tmp = ledger, objects, run, tmp
        self.attempt = ledger.begin_attempt(run)
        self.store = TrajectoryStore(objects)
        policies = PolicyStore(objects, ledger, places.cache)
        checkpoints = CheckpointStore(objects, ledger, run, places.cache, keep=2, attempt=self.attempt)
        self.updates = LedgerUpdates(
            ledger, policies, checkpoints, run, keep_policies=keep_policies, attempt=self.attempt
        )
        self.batches = LedgerBatches(ledger, self.store, run, PRESETS["sao"], 2, attempt=self.attempt)
        self.worker = new_worker_id("w")
        self._folders = 0

    def issue(self, *requests: NewRequest) -> None:
        self.ledger.issue(self.run, list(requests))

    def lease(self, count: int = 1) -> Any:
        source = LedgerRequests(self.ledger, self.run, self.worker, EVERYTHING, LEASE_S, attempt=self.attempt)
        return source.lease(count)

    def put(self, rollout: Rollout) -> None:
        writer = TrajectoryWriter(self.ledger, self.store, self.run, self.worker, flush_interval_s=0.0)
        writer.put(rollout)
        writer.close()

    def generate(self, count: int, **more: Any) -> None:
        """Make a rollout for each of the next requests, each an object of its own."""
        for request in self.lease(count):
            self.put((trajectory(request, **more),))

    def fail(self, parts: int = 0) -> None:
        """Give an attempt up, after some parts that nobody can go on from."""
        (request,) = self.lease()
        for number in range(parts):
            self.part(request, number)
        self.ledger.fail_attempt(self.run, self.worker, request.number, request.attempt, "sandbox lost: timeout")

    def part(self, request: RolloutRequest, number: int, state: str | None = None) -> None:
        piece = trajectory(request, seed=number, outcome=Outcome.FAILED, stop_reason=UNFINISHED)
        part = RolloutPart(number, (piece,), turns=number, open_tokens=0, state=state)
        assert self.ledger.record_part(self.run, self.worker, write_part(self.objects, self.worker, part))

    def folder(self, text: str) -> Path:
        self._folders += 1
        path = self.tmp / self.run / f"made-{self.attempt}-{self._folders}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_text(text)
        return path

    def step(self, step: int, *, refuse: int | None = None, publish: bool = True) -> None:
        batch = self.batches.claim(step)
        newest = self.ledger.newest_policy(self.run)
        assert batch is not None
        assert newest is not None
        first = [rollout[0] for rollout in batch.rollouts]
        trained = tuple(t.trajectory_id for t in first if t.request_number != refuse)
        rejected = {t.trajectory_id: "stale" for t in first if t.request_number == refuse}
        after = self.updates.next_version() if publish else newest.version
        metrics = {"reward/mean": 0.25 * step, "time/step_s": 1.0}
        tokens = {trained[0]: {"values": [0.5] * batch.rollouts[0][0].num_tokens}}
        record = UpdateRecord(step, newest.version, after, metrics, trained, rejected, tokens)
        self.updates.commit(record, self.folder(f"version {after}") if publish else None)

    def checkpoint(self, step: int) -> None:
        self.updates.checkpoint(step, self.folder(f"state of step {step}"))
        self.updates.flush()

    def close(self) -> None:
        self.updates.close()


def new_run(ledger: Ledger) -> str:
    run = f"run-{secrets.token_hex(6)}"
    ledger.create_run(run, CONFIG.recipe, "sao", CONFIG.model_dump(mode="json"))
    return run


def make_healthy_run(places: Places, ledger: Ledger, objects: ObjectStore, tmp: Path) -> str:
    """Make it up to its completion; returns its id."""
    run = new_run(ledger)
    first = Maker(places, ledger, objects, run, tmp)
    first.updates.publish_initial(first.folder("version 0"), step=0)
    first.issue(*(NewRequest(Purpose.VALUE_PRETRAIN, f"p{i}") for i in range(2)))
    first.issue(NewRequest(Purpose.EVALUATE, "held-out", policy_version=0))
    first.generate(3)
    ledger.add_evaluation(run, 0, 0, "calculator", {"reward_mean": 1.0}, ledger.policy(run, 0).sha256)
    first.issue(*group(7, size=2))
    first.generate(2)
    first.step(1)
    first.checkpoint(1)
    first.issue(*prompts(6))
    (whole,) = first.lease()
    first.put(segments(whole, 2))
    first.generate(1)
    first.step(2)
    first.generate(1, outcome=Outcome.FAILED, stop_reason="tool crashed")
    first.generate(1)
    first.fail()
    first.generate(2)
    first.close()

    second = Maker(places, ledger, objects, run, tmp)
    assert second.updates.latest_checkpoint() is not None
    second.step(2)
    second.step(3, publish=False)
    second.issue(*prompts(3))
    for _ in range(2):
        second.fail()
    second.fail(parts=2)
    second.generate(2)
    second.step(4, refuse=9)
    second.checkpoint(4)
    second.generate(1)
    second.issue(*prompts(1))
    ledger.cancel_requests(run)
    second.close()
    ledger.set_status(run, "completed")
    return run
