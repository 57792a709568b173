"""A run in a ledger, and trajectories for its requests."""

from __future__ import annotations

import secrets
from itertools import pairwise

import numpy as np

from infra.ledger import Ledger, NewPolicy, NewRequest
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Outcome, Purpose, Role, Trajectory, Turn

LEASE_S = 3600.0
ACTION_TOKENS, OBSERVATION_TOKENS = 100, 20


def new_run(ledger: Ledger) -> str:
    """A started run with an initial policy."""
    run_id = f"benchmark-{secrets.token_hex(4)}"
    ledger.create_run(run_id, "benchmark", "sao", {"rollout": {"max_attempts": 3}})
    ledger.begin_attempt(run_id)
    ledger.add_policy(run_id, NewPolicy(0, "policies/0", "0" * 64), step=0)
    return run_id


def issued(ledger: Ledger, run_id: str, count: int) -> None:
    """Ask for ``count`` training rollouts."""
    first = ledger.prompts_issued(run_id)
    ledger.issue(run_id, [NewRequest(Purpose.TRAIN, f"train/{first + index}") for index in range(count)])


def trajectory(request: RolloutRequest, num_tokens: int, random: np.random.Generator) -> Trajectory:
    """Turns of 100 sampled and 20 inserted tokens, with log-probabilities as random as real ones; no text."""
    position = np.arange(num_tokens)
    mask = position % (ACTION_TOKENS + OBSERVATION_TOKENS) < ACTION_TOKENS
    mask[0], mask[-1] = False, True
    rewards = np.zeros(num_tokens, np.float32)
    rewards[-1] = 1.0
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), num_tokens]
    turns = tuple(Turn(Role.ASSISTANT if mask[start] else Role.TOOL, start, stop) for start, stop in pairwise(edges))
    return Trajectory(
        trajectory_id=f"{request.run_id}-{request.number}-{request.attempt}-0",
        run_id=request.run_id,
        request_number=request.number,
        attempt=request.attempt,
        purpose=request.purpose,
        prompt_key=request.prompt_key,
        token_ids=(random.zipf(1.3, num_tokens) % 50_000).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -random.exponential(0.5, num_tokens), 0).astype(np.float32),
        policy_versions=np.where(mask, position // 5000, -1).astype(np.int32),
        rewards=rewards,
        score=1.0,
        outcome=Outcome.COMPLETED,
        stop_reason="terminated",
        turns=turns,
        renderer_hash="0" * 64,
        environment="benchmark",
        environment_version="1",
        difficulty="1",
        reward_parts={"correct": 1.0},
        timings={"started_at": 1.8e9, "duration_s": 1.5, "environment_s": 0.5, "generation_s": 1.0},
    )
