"""Rollouts without a model: valid records of random tokens, whole or in parts, as an engine would have made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from infra.trajectory_store import TrajectoryWriter
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.parts import UNFINISHED, RolloutPart, Unfinished, join
from sao_core.trajectory import ARRAY_FIELDS, Message, Outcome, Role, Trajectory, Turn


def generate(
    request: RolloutRequest, version: int, rng: np.random.Generator, begun: Unfinished | None = None
) -> Rollout:
    """One to three segments of 10 to 2000 tokens, some of them failed; or one that goes on with what was ``begun``."""
    if begun is not None:
        return (_go_on(begun, segment(request, version, rng, 0, 1)),)
    count = int(rng.choice([1, 1, 1, 1, 2, 3]))
    failed = rng.random() < 0.05
    return tuple(segment(request, version, rng, index, count, failed=failed) for index in range(count))


def unfinished(writer: TrajectoryWriter, request: RolloutRequest, version: int) -> Unfinished | None:
    """What an earlier worker left of a request, unless newer weights than ``version`` made it."""
    if not request.parts:
        return None
    parts = writer.parts(request)
    begun = join(parts) if parts else None
    if begun is None or begun.version_max > version:
        writer.give_up_parts(request)
        return None
    return begun


def parts_of(whole: Trajectory, begun: Unfinished | None, rng: np.random.Generator) -> Iterator[RolloutPart]:
    """What a rollout has beyond what was ``begun``, in one to three parts that leave its last tokens out."""
    start = 0 if begun is None else begun.segments[0].num_tokens
    first = 0 if begun is None else begun.parts
    if whole.num_tokens - start < 2:
        return
    cuts = np.unique(rng.integers(start + 1, whole.num_tokens, size=3)).tolist()
    for number, (left, right) in enumerate(zip([start, *cuts], cuts, strict=False), start=first):
        arrays = {name: getattr(whole, name)[left:right] for name in ARRAY_FIELDS}
        piece = replace(whole, **arrays, outcome=Outcome.FAILED, stop_reason=UNFINISHED, turns=(), messages=())
        yield RolloutPart(number=number, pieces=(piece,), turns=0, open_tokens=0, state="{}")


def _go_on(begun: Unfinished, more: Trajectory) -> Trajectory:
    old = begun.segments[0]
    arrays = {name: np.concatenate([getattr(old, name), getattr(more, name)]) for name in ARRAY_FIELDS}
    turns = (Turn(Role.USER, 0, 1), Turn(Role.ASSISTANT, 1, len(arrays["token_ids"])))
    return replace(more, **arrays, turns=turns)


def segment(
    request: RolloutRequest, version: int, rng: np.random.Generator, index: int, count: int, *, failed: bool = False
) -> Trajectory:
    """One segment of a rollout."""
    tokens = int(np.exp(rng.uniform(np.log(10), np.log(2000))))
    mask = np.arange(tokens) >= tokens // 3
    rewards = np.zeros(tokens, np.float32)
    rewards[-1] = 1.0
    return Trajectory(
        trajectory_id=f"{request.run_id}-{request.number}-{request.attempt}-{index}",
        run_id=request.run_id,
        request_number=request.number,
        attempt=request.attempt,
        purpose=request.purpose,
        prompt_key=request.prompt_key,
        token_ids=rng.integers(0, 150_000, tokens).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(1.0, tokens), 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        rewards=rewards,
        score=float(count),
        outcome=Outcome.FAILED if failed else Outcome.COMPLETED,
        stop_reason="sandbox_lost" if failed else "answered",
        segment=index,
        num_segments=count,
        group=request.group,
        turns=(Turn(Role.USER, 0, tokens // 3), Turn(Role.ASSISTANT, tokens // 3, tokens)),
        messages=(Message(Role.USER, "?"), Message(Role.ASSISTANT, "!")),
        sampling=request.sampling,
    )
