"""One rollout: the policy and an environment take turns until either, or a limit, ends it.

A coroutine: while it waits for the environment or for its turn to be sampled, the others of its worker go on. What
the environment gets wrong (an exception, a time-out, an impossible reward) makes the rollout FAILED; what the limits
cut is TRUNCATED. Errors of the engine and of the template are nobody's rollout and are raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments.base import Environment, StepResult, Task
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.engine import Engine, Session, StopReason, session_seed
from sao_core.rollout.recorder import Circumstances, Recorder
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import SCORE_TOLERANCE, Message, Outcome, Purpose, Role, Sampling

log = logging.getLogger(__name__)

T = TypeVar("T")

_CUT_BY = {
    StopReason.MAX_NEW_TOKENS: "max_action_tokens",
    StopReason.CONTEXT_FULL: "max_context_tokens",
    StopReason.DEADLINE: "rollout_timeout",
}


class AttemptFailed(Exception):
    """The rollout broke before the policy said anything, so there is nothing to record but the reason."""


class _EnvironmentFailed(Exception):
    """The environment raised, took too long or returned what it must not."""


class _OutOfTime(Exception):
    """The rollout's own time is over."""


@dataclass
class _Clock:
    """The time limits of one rollout, and what its time went into."""

    step_timeout_s: float
    deadline: float
    started: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    environment_s: float = 0.0
    generation_s: float = 0.0

    def timings(self) -> dict[str, float]:
        return {
            "started_at": self.started_at,
            "duration_s": time.monotonic() - self.started,
            "environment_s": self.environment_s,
            "generation_s": self.generation_s,
        }


async def run_rollout(
    request: RolloutRequest,
    engine: Engine,
    environment: Environment,
    task: Task,
    renderer: Renderer,
    limits: RolloutConfig,
    *,
    environment_name: str,
    seed: int,
) -> Rollout:
    """Make the rollout of ``request`` in a fresh ``environment``, which is closed at the end.

    ``seed`` is the run's; the sampling depends on it, the request's number and the attempt. Raises
    :class:`AttemptFailed` if it broke before the first action, :class:`ConfigError` for sampling that a training
    rollout must not use, :class:`EngineError` if the engine broke.
    """
    check_sampling(request)
    recorder = Recorder(
        request,
        Circumstances(
            on_swap=limits.on_swap,
            renderer_hash=renderer.hash,
            environment=environment_name,
            environment_version=environment.version,
            environment_seed=seed,
            difficulty=task.difficulty,
        ),
    )
    clock = _Clock(limits.step_timeout_s, time.monotonic() + limits.rollout_timeout_s)
    parts: dict[str, float] = {}
    session = engine.open(request.sampling, session_seed(seed, request.number, request.attempt))
    try:
        outcome, reason = await _take_turns(session, environment, task, renderer, limits, recorder, clock, parts)
        low, high = environment.reward_range
        if not low - SCORE_TOLERANCE <= recorder.score <= high + SCORE_TOLERANCE:
            raise _EnvironmentFailed(f"score {recorder.score:.6g} is outside the environment's range {low}…{high}")
    except _OutOfTime:
        outcome, reason = Outcome.TRUNCATED, "rollout_timeout"
    except _EnvironmentFailed as error:
        outcome, reason = Outcome.FAILED, str(error)
    finally:
        session.close()
        await _close(environment, clock)
    if not recorder.num_action_tokens:
        raise AttemptFailed(reason)
    return recorder.rollout(outcome, reason, parts, clock.timings())


def check_sampling(request: RolloutRequest) -> None:
    """Training learns from samples of the policy itself; raises :class:`ConfigError` for any other.

    Top-p and top-k multiply every importance ratio by the surviving mass; greedy draws have no probability at all.
    """
    plain = Sampling(temperature=request.sampling.temperature)
    if request.purpose is not Purpose.EVALUATE and request.sampling != plain:
        raise ConfigError(
            f"request {request.number}: a {request.purpose} rollout must sample from the policy itself "
            f"(top_p=1, top_k=0, not greedy): got {request.sampling}"
        )


async def _take_turns(
    session: Session,
    environment: Environment,
    task: Task,
    renderer: Renderer,
    limits: RolloutConfig,
    recorder: Recorder,
    clock: _Clock,
    parts: dict[str, float],
) -> tuple[Outcome, str]:
    """The conversation; returns how it ended and why."""
    opening = await _ask(environment.reset(task), "reset", clock)
    if not opening:
        raise _EnvironmentFailed("environment reset returned no messages")
    recorder.messages += opening
    ids = renderer.prompt_ids(opening)
    if len(ids) >= session.room:
        raise _EnvironmentFailed(
            f"the prompt has {len(ids)} tokens, which leaves no room in rollout.max_context_tokens={session.room}"
        )
    recorder.start_segment(opening[-1].role, ids)
    for _ in range(limits.max_turns):
        started = time.monotonic()
        left = limits.max_action_tokens - recorder.num_action_tokens
        sampled = await session.extend_and_sample(ids, renderer.stop_ids, left, clock.deadline)
        clock.generation_s += time.monotonic() - started
        recorder.act(sampled)
        action = renderer.action_text(sampled.token_ids.tolist())
        recorder.messages.append(Message(Role.ASSISTANT, action))
        if sampled.stop_reason is not StopReason.STOP_TOKEN:
            return Outcome.TRUNCATED, _CUT_BY[sampled.stop_reason]
        history = tuple(recorder.messages)
        result = await _ask(environment.step(action), "step", clock)
        recorder.reward(_checked(result, parts))
        recorder.messages += result.observation
        if result.terminated:
            return Outcome.COMPLETED, "terminated"
        if result.truncated:
            return Outcome.TRUNCATED, "environment"
        if recorder.num_action_tokens >= limits.max_action_tokens:
            return Outcome.TRUNCATED, "max_action_tokens"
        extension = renderer.next_turn_ids(history, result.observation)
        role = result.observation[-1].role if result.observation else Role.USER
        if extension is None:
            session.restart()
            ids = renderer.prompt_ids(recorder.messages)
        else:
            ids = extension
        if len(ids) >= session.room:
            return Outcome.TRUNCATED, "max_context_tokens"
        (recorder.start_segment if extension is None else recorder.observe)(role, ids)
    return Outcome.TRUNCATED, "max_turns"


async def _ask(answer: Awaitable[T], what: str, clock: _Clock) -> T:
    """Wait for the environment within the limits; whatever it raises is its failure."""
    started = time.monotonic()
    left = clock.deadline - started
    try:
        async with asyncio.timeout(min(left, clock.step_timeout_s)) as scope:
            return await answer
    except Exception as error:
        if not scope.expired():
            raise _EnvironmentFailed(f"environment {what} raised {type(error).__name__}: {error}") from error
        if left <= clock.step_timeout_s:
            raise _OutOfTime from None
        raise _EnvironmentFailed(
            f"environment {what} took longer than rollout.step_timeout_s={clock.step_timeout_s:g}"
        ) from None
    finally:
        clock.environment_s += time.monotonic() - started


def _checked(result: StepResult, parts: dict[str, float]) -> float:
    """The reward of a step, once it is known to be a number; its parts are added up over the turns."""
    if not isinstance(result, StepResult):
        raise _EnvironmentFailed(f"environment step must return a StepResult: got {type(result).__name__}")
    try:
        reward = float(result.reward)
        for name, value in result.info.get("reward_parts", {}).items():
            parts[name] = parts.get(name, 0.0) + float(value)
    except (TypeError, ValueError, AttributeError) as error:
        raise _EnvironmentFailed(f"environment step returned a reward that is no number: {error}") from error
    if not math.isfinite(reward):
        raise _EnvironmentFailed(f"environment step returned a reward of {reward}")
    return reward


async def _close(environment: Environment, clock: _Clock) -> None:
    """Close the environment; that it fails to is no fault of the rollout, but must be seen."""
    try:
        async with asyncio.timeout(clock.step_timeout_s):
            await environment.close()
    except Exception as error:
        log.warning("closing the environment failed: %s: %s", type(error).__name__, error)
