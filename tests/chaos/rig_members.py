"""The members of a rig: learner, worker, issuer, and the helper that resumes the run.

Each is a process of its own over the real ledger, store and ports. Instead of a model there is a record: the weights
are the list of trajectories that made them, so that the surviving weights tell what they were trained on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rig_plan import Plan
from rig_rollouts import generate, parts_of, segment, unfinished

from infra.checkpoints import CheckpointStore
from infra.learner_ports import LedgerBatches, LedgerUpdates
from infra.ledger import Fenced, Ledger, NewPolicy, NewRequest, TrajectoryRow
from infra.manifest import CorruptFolder
from infra.objects import ObjectMissing, StoreFull
from infra.policy_store import LedgerPolicies, PolicyGone, PolicyStore
from infra.requests import LedgerRequests, new_worker_id
from infra.trajectory_format import encode
from infra.trajectory_store import TrajectoryStore, TrajectoryWriter
from sao_core.algorithms import PRESETS
from sao_core.protocols import Batch, Rollout, RolloutRequest, UpdateRecord
from sao_core.trajectory import Purpose

CHECKPOINT_EVERY = 2
KEPT = 2
IDLE_S = 0.02
MODEL = "trained.json"
FINISHED, CRASHED, FENCED, STORE_FULL, STOPPED = 0, 1, 3, 4, 5
"""How a member ends, as its exit code."""


@dataclass
class Model:
    """Weights that remember: which trajectories made the critic, which the policy."""

    step: int = 0
    version: int = 0
    critic: list[str] = field(default_factory=list)
    policy: list[str] = field(default_factory=list)

    def save(self, folder: Path, *, checkpoint: bool) -> Path:
        """Write a policy, or everything."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        state = {"policy": self.policy, **({"critic": self.critic, "version": self.version} if checkpoint else {})}
        (folder / MODEL).write_text(json.dumps(state))
        weights = np.random.default_rng(len(self.policy)).bytes(20_000)
        for shard in range(2):
            (folder / f"weights-{shard}.bin").write_bytes(weights[shard::2])
        return folder

    @classmethod
    def load(cls, step: int, folder: Path) -> Model:
        """From a checkpoint."""
        state = read_model(folder)
        return cls(step, state["version"], state["critic"], state["policy"])


def read_model(folder: Path) -> dict[str, Any]:
    """What a stored policy or checkpoint was trained on."""
    return json.loads((folder / MODEL).read_text())


class Stopped(Exception):
    """A learner was told to stop before it was done."""


class Stop:
    """Set by SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def resume(plan: Plan) -> None:
    """Begin the next attempt of the run, as a flow does that starts or resumes it."""
    ledger = plan.open_ledger()
    ledger.create_run(plan.run_id, "chaos", "sao", {"rollout": {"max_attempts": 6}})
    plan.say("attempt", number=ledger.begin_attempt(plan.run_id))


def issuer(plan: Plan) -> None:
    """Issue prompts up to a bound read from the ledger, as the flow does beside its learner."""
    ledger, stop = plan.open_ledger(), Stop()
    bound = 5 * plan.batch_size
    while not stop.asked:
        prompts = (bound - ledger.outstanding(plan.run_id)) // plan.group_size
        issued = ledger.prompts_issued(plan.run_id)
        wanted = [
            NewRequest(Purpose.TRAIN, f"prompt-{number}", group=number if plan.group_size > 1 else None)
            for number in range(issued, issued + prompts)
            for _ in range(plan.group_size)
        ]
        if not wanted or not ledger.issue(plan.run_id, wanted, frontier=issued):
            time.sleep(IDLE_S)


def worker(plan: Plan, attempt: int, seed: int) -> None:
    """Serve requests of one attempt of the run until told to stop, or fenced off."""
    ledger, objects, stop = plan.open_ledger(), plan.open_objects(), Stop()
    rng = np.random.default_rng(seed)
    name = new_worker_id("rollout")
    requests = LedgerRequests(ledger, plan.run_id, name, (Purpose.TRAIN,), plan.lease_s, attempt=attempt, poll_s=IDLE_S)
    writer = TrajectoryWriter(ledger, TrajectoryStore(objects), plan.run_id, name, flush_interval_s=0.05)
    feed = PolicyStore(objects, ledger, plan.path("cache")).feed(plan.run_id)
    loaded: int | None = None
    beat_at = 0.0
    try:
        while not stop.asked:
            if time.monotonic() >= beat_at:
                requests.heartbeat("running", loaded)
                beat_at = time.monotonic() + plan.lease_s / 6
            newest = feed.newest()
            if newest is None:
                ledger.require_attempt(plan.run_id, attempt)
                time.sleep(IDLE_S)
                continue
            if newest != loaded:
                loaded = load(ledger, feed, newest, loaded)
            leased = requests.lease(2) if loaded is not None else []
            for request in leased:
                if rng.random() < 0.06:
                    requests.fail(request, "environment: lost its sandbox")
                else:
                    serve(writer, request, loaded or 0, rng)
            if not leased:
                time.sleep(IDLE_S)
    except Exception as error:
        requests.report_failure(repr(error))
        raise
    writer.close()
    requests.release()


def serve(writer: TrajectoryWriter, request: RolloutRequest, version: int, rng: np.random.Generator) -> None:
    """Make a rollout, or go on with one that a worker left; a long one is written in parts before it is whole."""
    begun = unfinished(writer, request, version)
    rollout = generate(request, version, rng, begun)
    if len(rollout) == 1 and rng.random() < 0.3:
        for part in parts_of(rollout[0], begun, rng):
            writer.put_part(part)
            time.sleep(rng.random() * 0.01)
    writer.put(rollout)


def load(ledger: Ledger, feed: LedgerPolicies, version: int, loaded: int | None) -> int | None:
    """Bring a version; one that was removed while this process was silent is passed over."""
    try:
        read_model(feed.fetch(version))
        return version
    except (PolicyGone, CorruptFolder, ObjectMissing, FileNotFoundError):
        run = feed._run_id
        policy = ledger.policy(run, version)
        if policy.removed_at is None and not policy.superseded:
            raise
        return loaded


def learner(plan: Plan, attempt: int, seed: int) -> None:
    """Claim, train, commit, publish and keep checkpoints, from the newest checkpoint on, until all is calm."""
    ledger, objects, stop = plan.open_ledger(), plan.open_objects(), Stop()
    rng = np.random.default_rng(seed)
    scratch = plan.path("scratch") / str(os.getpid())
    policies = PolicyStore(objects, ledger, plan.path("cache"))
    checkpoints = CheckpointStore(objects, ledger, plan.run_id, plan.path("cache"), keep=KEPT, attempt=attempt)
    updates = LedgerUpdates(
        ledger,
        policies,
        checkpoints,
        plan.run_id,
        keep_policies=KEPT,
        worker_silent_s=plan.silent_s,
        attempt=attempt,
    )
    batches = LedgerBatches(
        ledger, TrajectoryStore(objects), plan.run_id, PRESETS["sao"], plan.batch_size, attempt=attempt
    )
    try:
        model = begin(plan, updates, policies, scratch)
    except FileNotFoundError:
        ledger.require_attempt(plan.run_id, attempt)  # its successor has removed the checkpoint that it was reading
        raise
    kept, calm_until = model.step, None
    while calm_until is None or model.step < calm_until:
        if stop.asked:
            raise Stopped
        batch = batches.claim(model.step + 1)
        if batch is None:
            ledger.require_attempt(plan.run_id, attempt)
            time.sleep(IDLE_S)
            continue
        rejected = {rollout[0].trajectory_id: "stale" for rollout in batch.rollouts if rng.random() < 0.03}
        used = [rollout for rollout in batch.rollouts if rollout[0].trajectory_id not in rejected]
        update_value(model, used)
        update_policy(model, used)
        commit(updates, model, batch, used, rejected, scratch)
        if model.step % CHECKPOINT_EVERY == 0:
            kept = keep_checkpoint(updates, model, scratch)
        if calm_until is None and plan.calm.exists():
            calm_until = model.step + plan.calm_steps
    if kept != model.step:
        keep_checkpoint(updates, model, scratch)
    updates.close()


def begin(plan: Plan, updates: LedgerUpdates, policies: PolicyStore, scratch: Path) -> Model:
    """Go back to the newest checkpoint, or publish the first policy."""
    latest = updates.latest_checkpoint()
    if latest is None:
        model = Model()
        model.version = updates.publish_initial(model.save(scratch / "policy", checkpoint=False), step=0)
        keep_checkpoint(updates, model, scratch)
        return model
    model = Model.load(*latest)
    announced = read_model(policies.fetch(plan.run_id, model.version))["policy"]
    if announced != model.policy:
        raise AssertionError(f"policy {model.version} is not that of the checkpoint of step {model.step}")
    return model


def keep_checkpoint(updates: LedgerUpdates, model: Model, scratch: Path) -> int:
    """Ask for a checkpoint of the last step; returns that step."""
    updates.checkpoint(model.step, model.save(scratch / f"checkpoint-{model.step}", checkpoint=True))
    return model.step


def update_value(model: Model, rollouts: list[Rollout]) -> None:
    """Train the critic."""
    model.critic += [segment.trajectory_id for rollout in rollouts for segment in rollout]


def update_policy(model: Model, rollouts: list[Rollout]) -> None:
    """Train the policy."""
    model.policy += [segment.trajectory_id for rollout in rollouts for segment in rollout]


def commit(
    updates: LedgerUpdates,
    model: Model,
    batch: Batch,
    used: list[Rollout],
    rejected: dict[str, str],
    scratch: Path,
) -> None:
    """Store the policy and commit the step."""
    version = updates.next_version()
    record = UpdateRecord(
        step=batch.step,
        version_before=model.version,
        version_after=version,
        metrics={"reward/mean": 1.0},
        trained=tuple(rollout[0].trajectory_id for rollout in used),
        rejected=rejected,
        tokens={segment.trajectory_id: {"logprobs": segment.behavior_logprobs} for r in used[:1] for segment in r},
    )
    updates.commit(record, model.save(scratch / "policy", checkpoint=False))
    model.step, model.version = batch.step, version


def rehearse(folder: Path) -> None:
    """Go through the ledger's operations once, in the calling thread: what is prepared lazily is inherited by forks."""
    ledger = Ledger(f"sqlite:///{folder / 'rehearsal.db'}")
    run, policy = "rehearsal", NewPolicy(0, "policy", "0" * 64)
    ledger.create_run(run, "chaos", "sao", {})
    ledger.begin_attempt(run)
    ledger.add_policy(run, policy, step=0)
    ledger.issue(run, [NewRequest(Purpose.TRAIN, f"prompt-{number}") for number in range(3)], frontier=0)
    ledger.heartbeat(run, "w", "running", 0, "host", 1, 30.0, purposes=(Purpose.TRAIN,), holding=frozenset())
    requests = ledger.lease(run, "w", (Purpose.TRAIN,), 3, 30.0)
    rollouts = [segment(request, 0, np.random.default_rng(0), 0, 1) for request in requests[:2]]
    encode(rollouts)
    rows = [TrajectoryRow.of(rollout, "object", row, "0" * 64) for row, rollout in enumerate(rollouts)]
    ledger.record(run, "w", rows)
    ledger.fail_attempt(run, "w", requests[2].number, 1, "rehearsed")
    trained = [row.trajectory_id for row in ledger.claim(run, 1, 2)] if ledger.can_claim(run, 1, 2) else []
    after = replace(policy, version=ledger.next_version(run))
    ledger.commit_update(
        run, 1, 0, after.version, {"reward/mean": 1.0}, trained[:1], dict.fromkeys(trained[1:], "x"), after
    )
    ledger.set_checkpoint(run, 1, "checkpoint", "0" * 64)
    ledger.remove_checkpoints(run, 1)
    ledger.remove_policies(run, 1, 0.0)
    for look in (ledger.queue, ledger.outstanding, ledger.policy_steps, ledger.checkpoints, ledger.newest_policy):
        look(run)
    ledger.newest_policy(run, announced=True)
    ledger.rejected_since(run, 0.0, ledger.now())
    ledger.rewind(run, 1)
    ledger.announce(run, after.version)
    ledger.release(run, "w")
    ledger.expire(run, "w")
    ledger.close()


ROLES = {"resume": resume, "issuer": issuer, "worker": worker, "learner": learner}


def note_recorded(plan: Plan) -> None:
    """Have this process write down each id that the ledger said is recorded: the promise that is held to account."""
    record = Ledger.record

    def noted(ledger: Ledger, run_id: str, worker_name: str, rows: Any) -> list[str]:
        recorded = record(ledger, run_id, worker_name, rows)
        if recorded:
            plan.say("recorded", ids=recorded)
        return recorded

    Ledger.record = noted  # type: ignore[method-assign]


def exit_code(error: BaseException) -> int:
    """What a member that ends with ``error`` tells its supervisor."""
    codes = {Fenced: FENCED, StoreFull: STORE_FULL, Stopped: STOPPED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), CRASHED)
