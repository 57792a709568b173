"""One rollout: the policy and an environment take turns until either, or a limit, ends it.

A coroutine: while it waits for the environment or for its turn to be sampled, the others of its worker go on. What
the environment gets wrong (an exception, a time-out, an impossible reward) makes the rollout FAILED; what the limits
cut is TRUNCATED. Errors of the engine and of the template are nobody's rollout and are raised. A rollout that takes
long gives away in parts what it has, within a turn and within a step too, and another worker can go on from them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments.base import Environment, StepResult, Task
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.engine import Engine, Session, StopReason, session_seed
from sao_core.rollout.parts import RolloutPart, Unfinished
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


class NotRestored(Exception):
    """The environment cannot go on from where an earlier attempt left it: the rollout has to start anew."""


class _EnvironmentFailed(Exception):
    """The environment raised, took too long or returned what it must not."""


class _OutOfTime(Exception):
    """The rollout's own time is over."""


@dataclass
class _Clock:
    """The time limits of one rollout, counted from its first start, and what its time went into."""

    limits: RolloutConfig
    started: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    environment_s: float = 0.0
    generation_s: float = 0.0

    @classmethod
    def of(cls, limits: RolloutConfig, begun: Unfinished | None) -> _Clock:
        if begun is None:
            return cls(limits)
        spent = begun.segments[-1].timings
        started = time.monotonic() - spent["duration_s"]
        return cls(limits, started, spent["started_at"], spent["environment_s"], spent["generation_s"])

    @property
    def deadline(self) -> float:
        return self.started + self.limits.rollout_timeout_s

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
    begun: Unfinished | None = None,
    put_part: Callable[[RolloutPart], bool] | None = None,
) -> Rollout:
    """Make the rollout of ``request`` in a fresh ``environment``, which is closed at the end.

    ``seed`` is the run's; the sampling depends on it, the request's number, the attempt and what was ``begun``. The
    rollout goes on from ``begun``; every ``rollout.partial_after_s`` it gives what is new to ``put_part`` (which may
    refuse it for now), or keeps all to itself if there is none.
    Raises :class:`AttemptFailed` if it broke before the first action, :class:`NotRestored` if it cannot go on from
    ``begun``, :class:`ConfigError` for sampling that a training rollout must not use, :class:`EngineError` if the
    engine broke.
    """
    check_sampling(request)
    circumstances = Circumstances(
        on_swap=limits.on_swap,
        renderer_hash=renderer.hash,
        environment=environment_name,
        environment_version=environment.version,
        environment_seed=seed,
        difficulty=task.difficulty,
    )
    recorder = Recorder(request, circumstances, begun)
    clock = _Clock.of(limits, begun)
    session = engine.open(request.sampling, _seed_of(request, seed, begun))
    episode = _Episode(session, environment, task, renderer, limits, recorder, clock, put_part)
    try:
        if begun is not None:
            _require_same(circumstances, begun)
        outcome, reason = await episode.take_turns(begun)
        low, high = environment.reward_range
        if not low - SCORE_TOLERANCE <= recorder.score <= high + SCORE_TOLERANCE:
            raise _EnvironmentFailed(f"score {recorder.score:.6g} is outside the environment's range {low}…{high}")
    except _OutOfTime:
        outcome, reason = Outcome.TRUNCATED, "rollout_timeout"
    except _EnvironmentFailed as error:
        outcome, reason = Outcome.FAILED, str(error)
    finally:
        session.close()
        await _close(environment, limits.step_timeout_s)
    if not recorder.num_action_tokens:
        raise AttemptFailed(reason)
    return recorder.rollout(outcome, reason, clock.timings())


def _seed_of(request: RolloutRequest, seed: int, begun: Unfinished | None) -> int:
    """The seed of the session; one that goes on must not draw again with what its first tokens were drawn with."""
    own = session_seed(seed, request.number, request.attempt)
    return own if begun is None else session_seed(own, begun.parts, 0)


def _require_same(circumstances: Circumstances, begun: Unfinished) -> None:
    """Raise :class:`NotRestored` if the code or the settings of the run have changed since."""
    for name in ("renderer_hash", "environment", "environment_version", "on_swap"):
        before, now = getattr(begun.segments[-1], name), getattr(circumstances, name)
        if before != now:
            raise NotRestored(f"it was begun with {name} {before}, which is {now} now")


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


@dataclass
class _Episode:
    """The conversation of one rollout, and the parts of it that are due."""

    session: Session
    environment: Environment
    task: Task
    renderer: Renderer
    limits: RolloutConfig
    recorder: Recorder
    clock: _Clock
    put: Callable[[RolloutPart], bool] | None
    part_due: float = math.inf
    state: str | None = None
    """The environment as the turn at hand found it."""
    state_turn: int = -1
    failure: Exception | None = None
    """Why a part could not be put while the environment was waited for."""

    def __post_init__(self) -> None:
        if self.put is not None:
            self.part_due = time.monotonic() + self.limits.partial_after_s

    async def take_turns(self, begun: Unfinished | None) -> tuple[Outcome, str]:
        """The conversation; returns how it ended and why."""
        recorder, renderer, limits = self.recorder, self.renderer, self.limits
        ids = await (self._reset() if begun is None else self._restore(begun))
        while recorder.num_turns < limits.max_turns:
            if len(ids) >= self.session.room:
                return Outcome.TRUNCATED, "max_context_tokens"
            stop_reason = await self._speak(ids)
            action = renderer.action_text(recorder.open_turn)
            recorder.messages.append(Message(Role.ASSISTANT, action))
            if stop_reason is not StopReason.STOP_TOKEN:
                return Outcome.TRUNCATED, _CUT_BY[stop_reason]
            history = tuple(recorder.messages)
            if self.put is not None:
                self._take_state()
            result = await self._ask(self.environment.step(action), "step")
            recorder.reward(_checked(result, recorder.reward_parts))
            recorder.info |= _storable(result)
            recorder.messages += _readable(result.observation)
            if result.terminated:
                return Outcome.COMPLETED, "terminated"
            if result.truncated:
                return Outcome.TRUNCATED, "environment"
            if recorder.num_action_tokens >= limits.max_action_tokens:
                return Outcome.TRUNCATED, "max_action_tokens"
            tools = self.environment.shown_tools
            extension = renderer.next_turn_ids(history, result.observation, tools)
            role = result.observation[-1].role if result.observation else Role.USER
            if extension is None:
                self.session.restart()
                ids = renderer.prompt_ids(recorder.messages, tools)
            else:
                ids = extension
            if len(ids) >= self.session.room:
                return Outcome.TRUNCATED, "max_context_tokens"
            (recorder.start_segment if extension is None else recorder.observe)(role, ids)
        return Outcome.TRUNCATED, "max_turns"

    async def _reset(self) -> list[int]:
        """Open the conversation; returns its token ids."""
        opening = await self._ask(self.environment.reset(self.task), "reset")
        if not opening:
            raise _EnvironmentFailed("environment reset returned no messages")
        self.recorder.messages += _readable(opening)
        ids = self.renderer.prompt_ids(opening, self.environment.shown_tools)
        if len(ids) >= self.session.room:
            raise _EnvironmentFailed(
                f"the prompt has {len(ids)} tokens, which leaves no room in "
                f"rollout.max_context_tokens={self.session.room}"
            )
        self.recorder.start_segment(opening[-1].role, ids)
        return ids

    async def _restore(self, begun: Unfinished) -> list[int]:
        """Bring the environment to where it was; returns the token ids of the segment at hand."""
        if begun.state is None:
            raise NotRestored("the environment had no state to restore")
        try:
            await self._ask(self.environment.restore(self.task, json.loads(begun.state)), "restore")
        except _EnvironmentFailed as error:
            raise NotRestored(str(error)) from error
        return self.recorder.context

    async def _speak(self, ids: list[int]) -> StopReason:
        """One turn of the policy, sampled in stretches that end where a part is due."""
        while True:
            left = self.limits.max_action_tokens - self.recorder.num_action_tokens
            if left < 1:
                return StopReason.MAX_NEW_TOKENS
            started = time.monotonic()
            until = min(self.clock.deadline, self.part_due)
            sampled = await self.session.extend_and_sample(ids, self.renderer.stop_ids, left, until)
            self.clock.generation_s += time.monotonic() - started
            self.recorder.act(sampled)
            if sampled.stop_reason is not StopReason.DEADLINE or until >= self.clock.deadline:
                return sampled.stop_reason
            self._put_part()
            ids = []

    async def _ask(self, answer: Awaitable[T], what: str) -> T:
        """Wait for the environment within the limits; whatever it raises is its failure."""
        clock, step_timeout_s = self.clock, self.limits.step_timeout_s
        started = time.monotonic()
        left = clock.deadline - started
        try:
            with self._parts_meanwhile():
                async with asyncio.timeout(min(left, step_timeout_s)) as scope:
                    return await answer
        except Exception as error:
            if not scope.expired():
                raise _EnvironmentFailed(f"environment {what} raised {type(error).__name__}: {error}") from error
            if left <= step_timeout_s:
                raise _OutOfTime from None
            raise _EnvironmentFailed(
                f"environment {what} took longer than rollout.step_timeout_s={step_timeout_s:g}"
            ) from None
        finally:
            clock.environment_s += time.monotonic() - started
            if self.failure is not None:
                raise self.failure

    @contextmanager
    def _parts_meanwhile(self) -> Iterator[None]:
        """Put what is due while the rollout waits for something else."""
        if self.put is None:
            yield
            return
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def due() -> None:
            nonlocal timer
            try:
                self._put_part()
            except Exception as error:  # raised where the rollout waits, not in the event loop
                self.failure = error
            else:
                timer = loop.call_later(self.part_due - time.monotonic(), due)

        timer = loop.call_later(max(0.0, self.part_due - time.monotonic()), due)
        try:
            yield
        finally:
            timer.cancel()

    def _put_part(self) -> None:
        """Put what is new, if the policy has said anything and there is a place for it now."""
        assert self.put is not None
        self.part_due = time.monotonic() + self.limits.partial_after_s
        part = self.recorder.part(self.clock.timings())
        if part is not None and self.put(replace(part, state=self._take_state())):
            self.recorder.put()

    def _take_state(self) -> str | None:
        """The environment's state in JSON, once per turn and before its step begins."""
        if self.state_turn != self.recorder.num_turns:
            try:
                state = self.environment.state()
                self.state = None if state is None else json.dumps(state)
            except Exception as error:
                raise _EnvironmentFailed(f"environment state raised {type(error).__name__}: {error}") from error
            self.state_turn = self.recorder.num_turns
        return self.state


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


def _readable(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, once it is known that they are text: half a surrogate pair can be neither encoded nor stored."""
    for message in messages:
        try:
            message.content.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise _EnvironmentFailed(f"environment gave a message whose content is no text: {error}") from None
    return messages


def _storable(result: StepResult) -> dict[str, str | float | bool]:
    """What of a step's ``info`` is stored: texts and finite numbers."""
    return {
        str(name): value
        for name, value in result.info.items()
        if isinstance(value, str) or (isinstance(value, (bool, int, float)) and math.isfinite(value))
    }


async def _close(environment: Environment, step_timeout_s: float) -> None:
    """Close the environment; that it fails to is no fault of the rollout, but must be seen."""
    try:
        async with asyncio.timeout(step_timeout_s):
            await environment.close()
    except Exception as error:
        log.warning("closing the environment failed: %s: %s", type(error).__name__, error)
