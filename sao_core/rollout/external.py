"""One rollout that a program of its own drives: it is started, its calls are answered, its end brings the reward.

The counterpart of :mod:`sao_core.rollout.agent`, with the same limits. What the program gets wrong (a crash, silence,
no reward or an impossible one) makes the rollout FAILED; what the limits cut is TRUNCATED, and the program may still
leave a reward. Nothing of it is stored before its end: a program cannot be restored, so if a worker dies, the rollout
starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sao_core.agent_programs import MODEL_NAME, Address, ProgramEnded, RunningProgram
from sao_core.config import RolloutConfig
from sao_core.environments.base import Task
from sao_core.environments.external import ExternalAgent, UnusableResult
from sao_core.outside import Outside
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.agent import AttemptFailed, check_sampling
from sao_core.rollout.capture import CapturedRollout
from sao_core.rollout.engine import Engine, session_seed
from sao_core.rollout.recorder import Circumstances, Recorder
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Outcome

log = logging.getLogger(__name__)

TIMEOUT = "rollout_timeout"


async def run_external(
    request: RolloutRequest,
    engine: Engine,
    agent: ExternalAgent,
    task: Task,
    renderer: Renderer,
    limits: RolloutConfig,
    outside: Outside,
    *,
    environment_name: str,
    seed: int,
) -> Rollout:
    """Make the rollout of ``request`` by a fresh run of ``agent``'s program.

    ``rollout.step_timeout_s`` bounds its silence: the time that it may pass without a call. ``seed`` is the run's.
    Raises :class:`AttemptFailed` if the policy said nothing, :class:`sao_core.outside.NotLent` where there is no
    endpoint or nobody to start programs, :class:`ConfigError` for sampling that a training rollout must not use, and
    what the engine raises.
    """
    check_sampling(request)
    recorder = Recorder(
        request,
        Circumstances(
            on_swap=limits.on_swap,
            renderer_hash=renderer.hash,
            environment=environment_name,
            environment_version=agent.version,
            environment_seed=seed,
            difficulty=task.difficulty,
        ),
    )
    started, started_at = time.monotonic(), time.time()
    deadline = started + limits.rollout_timeout_s
    session = engine.open(request.sampling, session_seed(seed, request.number, request.attempt))
    captured = CapturedRollout(session, renderer, limits, recorder, request.sampling, deadline)
    try:
        async with (
            outside.endpoint.serving(captured) as address,
            outside.programs.start(agent.command(task), task.data["row"], _variables(address)) as program,
        ):
            ended, stopped = await _watch(program, captured, limits, deadline)
    finally:
        captured.close()
        session.close()
    if captured.failure is not None:
        raise captured.failure
    if stopped == TIMEOUT:
        captured.limit = TIMEOUT
    outcome, reason = await _judged(agent, task, ended, stopped, captured, recorder, limits.step_timeout_s)
    if not recorder.num_action_tokens:
        raise AttemptFailed(f"no call was answered: {reason}: {ended.last_words}".removesuffix(": "))
    duration = time.monotonic() - started
    timings = {
        "started_at": started_at,
        "duration_s": duration,
        "environment_s": duration - captured.generation_s,
        "generation_s": captured.generation_s,
    }
    return recorder.rollout(outcome, reason, timings)


def _variables(address: Address) -> dict[str, str]:
    """What a program reads of the policy; some clients still use the older name of the address."""
    return {
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_BASE": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        "OPENAI_MODEL": MODEL_NAME,
    }


async def _watch(
    program: RunningProgram, captured: CapturedRollout, limits: RolloutConfig, deadline: float
) -> tuple[ProgramEnded, str | None]:
    """What is left of the program, and why it was stopped if it did not end by itself."""
    waiting = asyncio.ensure_future(program.wait())
    try:
        while True:
            now = time.monotonic()
            quiet_since = captured.quiet_since
            silent_at = (now if quiet_since is None else quiet_since) + limits.step_timeout_s
            await asyncio.wait([waiting], timeout=max(0.0, min(deadline, silent_at) - now))
            if waiting.done():
                return waiting.result(), None
            now, quiet_since = time.monotonic(), captured.quiet_since
            if now >= deadline:
                stopped = TIMEOUT
                break
            if quiet_since is not None and now >= quiet_since + limits.step_timeout_s:
                stopped = f"the program made no call for rollout.step_timeout_s={limits.step_timeout_s:g}"
                break
    finally:
        waiting.cancel()
    captured.close()
    return await program.stop(), stopped


async def _judged(
    agent: ExternalAgent,
    task: Task,
    ended: ProgramEnded,
    stopped: str | None,
    captured: CapturedRollout,
    recorder: Recorder,
    step_timeout_s: float,
) -> tuple[Outcome, str]:
    """How the rollout ended and why; what it earned is recorded."""
    try:
        if stopped is not None:
            raise UnusableResult(f"{stopped}: {ended.last_words}" if ended.last_words else stopped)
        async with asyncio.timeout(step_timeout_s):
            result = await agent.judge(task, ended, recorder.messages)
    except (UnusableResult, TimeoutError) as error:
        if captured.limit is None:
            return Outcome.FAILED, str(error) or f"its judge took longer than rollout.step_timeout_s={step_timeout_s:g}"
        log.info("%s ended its rollout, and its program left no reward: %s", captured.limit, error)
    else:
        if recorder.num_action_tokens:
            recorder.reward(result.reward)
            recorder.reward_parts.update(result.info["reward_parts"])
    if captured.limit is not None:
        return Outcome.TRUNCATED, captured.limit
    return Outcome.COMPLETED, "terminated"
