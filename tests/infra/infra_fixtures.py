"""Builders for tests of ledger and stores."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infra.ledger import Ledger, NewPolicy, NewRequest, TrajectoryRow
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.trajectory import Message, Outcome, Purpose, Role, Trajectory, Turn

LEASE_S = 30.0
TRAIN = (Purpose.TRAIN,)


@dataclass(frozen=True)
class Places:
    """Where a test keeps its things."""

    database_url: str
    object_store: str
    endpoint_url: str | None
    cache: Path


def start_run(ledger: Ledger, max_attempts: int = 2) -> str:
    run_id = f"run-{secrets.token_hex(6)}"
    ledger.create_run(run_id, "tiny", "sao", {"rollout": {"max_attempts": max_attempts}})
    ledger.begin_attempt(run_id)
    ledger.add_policy(run_id, policy(0), step=0)
    return run_id


def policy(version: int) -> NewPolicy:
    return NewPolicy(version, f"policies/{version}", f"{version:064d}")


def prompts(count: int, first: int = 0, **more: Any) -> list[NewRequest]:
    return [NewRequest(Purpose.TRAIN, f"prompt-{first + i}", **more) for i in range(count)]


def group(number: int, size: int = 4) -> list[NewRequest]:
    return [NewRequest(Purpose.TRAIN, f"prompt-{number}", group=number) for _ in range(size)]


def trajectory(request: RolloutRequest, *, seed: int = 0, tokens: int = 12, **more: Any) -> Trajectory:
    """A valid trajectory for a request: a third prompt, a third actions, an observation, actions."""
    generator = np.random.default_rng(seed + 7919 * request.number + request.attempt)
    mask = np.arange(tokens) >= tokens // 3
    mask[tokens // 2 : tokens // 2 + 2] = False
    version = request.policy_version or 0
    rewards = np.zeros(tokens, np.float32)
    rewards[-1] = 1.0
    values: dict[str, Any] = {
        "trajectory_id": f"{request.run_id}-{request.number}-{request.attempt}-0",
        "run_id": request.run_id,
        "request_number": request.number,
        "attempt": request.attempt,
        "purpose": request.purpose,
        "prompt_key": request.prompt_key,
        "token_ids": generator.integers(0, 150_000, tokens).astype(np.int32),
        "action_mask": mask,
        "behavior_logprobs": np.where(mask, -generator.exponential(1.0, tokens), 0.0).astype(np.float32),
        "policy_versions": np.where(mask, version, -1).astype(np.int32),
        "rewards": rewards,
        "score": 1.0,
        "outcome": Outcome.COMPLETED,
        "stop_reason": "answered",
        "group": request.group,
        "turns": (Turn(Role.USER, 0, tokens // 3), Turn(Role.ASSISTANT, tokens // 3, tokens)),
        "messages": (Message(Role.USER, "What is 2 × 3?"), Message(Role.ASSISTANT, "6")),
        "sampling": request.sampling,
        "difficulty": "2",
        "reward_parts": {"answer": 1.0},
        "timings": {"generate_s": 0.25},
    }
    return Trajectory(**(values | more))


def segments(request: RolloutRequest, count: int) -> Rollout:
    """One rollout in ``count`` segments, whose rewards sum to the score."""
    made = []
    for segment in range(count):
        one = trajectory(request, seed=segment, segment=segment, num_segments=count, score=float(count))
        made.append(replace(one, trajectory_id=f"{request.run_id}-{request.number}-{request.attempt}-{segment}"))
    return tuple(made)


def row(request: RolloutRequest, **more: Any) -> TrajectoryRow:
    """What the ledger is told of a request's trajectory."""
    return replace(TrajectoryRow.of(trajectory(request), f"object-{request.number}", 0, "0" * 64), **more)


def make(
    ledger: Ledger, run_id: str, count: int, worker: str = "w", purposes: Sequence[Purpose] = TRAIN, **more: Any
) -> list[RolloutRequest]:
    """Lease ``count`` requests and record a completed rollout for each."""
    requests = ledger.lease(run_id, worker, purposes, count, LEASE_S)
    ledger.record(run_id, worker, [row(request, **more) for request in requests])
    return requests


def train(ledger: Ledger, run_id: str, step: int, batch_size: int, **more: Any) -> list[str]:
    """Claim and commit a step that publishes the next policy; returns what it trained."""
    ids = [r.trajectory_id for r in ledger.claim(run_id, step, batch_size)]
    before = ledger.newest_policy(run_id)
    assert before is not None
    after = ledger.next_version(run_id)
    values = {"metrics": {"reward/mean": 0.5}, "trained": ids, "rejected": {}, "policy": policy(after)} | more
    ledger.commit_update(run_id, step, before.version, after, **values)
    return ids
