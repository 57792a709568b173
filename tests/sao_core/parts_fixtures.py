"""Rollouts that are cut up into parts: an engine, an environment and a player for their tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from rollout_fixtures import TOKENIZER, Answer, ScriptedEngine, ScriptedEnvironment, request

from sao_core.config import RolloutConfig
from sao_core.environments.base import Environment, Task
from sao_core.protocols import Rollout
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.engine import Sampled, StopReason
from sao_core.rollout.parts import RolloutPart, Unfinished
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import ARRAY_FIELDS, Message, Role, Trajectory

LIMITS = RolloutConfig(
    max_turns=4,
    max_action_tokens=64,
    max_context_tokens=512,
    step_timeout_s=5,
    rollout_timeout_s=30,
    partial_after_s=1e-9,
)
RENDERER = Renderer(TOKENIZER)


class StretchedEngine(ScriptedEngine):
    """Says the given stretches, one per call; a turn goes on until one ends with its end-of-turn token."""

    async def extend_and_sample(
        self, new_ids: Sequence[int], stop_ids: Set[int], max_new_tokens: int, deadline: float | None = None
    ) -> Sampled:
        sampled = await super().extend_and_sample(new_ids, stop_ids, max_new_tokens, deadline)
        cut = sampled.stop_reason is not StopReason.STOP_TOKEN
        return replace(sampled, stop_reason=StopReason.DEADLINE) if cut else sampled


class Counting(ScriptedEnvironment):
    """Its state is the number of steps; restored, it gives the answers that are left."""

    def __init__(self, results: Sequence[Answer], opening: Any = (Message(Role.USER, "what is 1 plus 2"),)) -> None:
        super().__init__(results, opening)
        self.restored: list[Any] = []

    def state(self) -> Any:
        return {"steps": len(self.actions)}

    async def restore(self, task: Task, state: Any) -> None:
        self.restored.append((task.key, state))
        self.actions = [""] * state["steps"]


def play(
    engine: Any,
    environment: Environment,
    *,
    put: Callable[[RolloutPart], bool] | None = None,
    begun: Unfinished | None = None,
    renderer: Renderer = RENDERER,
    attempt: int = 1,
    **limits: Any,
) -> Rollout:
    async def both() -> Rollout:
        pump = asyncio.create_task(engine.run())
        try:
            return await run_rollout(
                request(4, attempt),
                engine,
                environment,
                Task("task-4", "2"),
                renderer,
                LIMITS.model_copy(update=limits),
                environment_name="counting",
                seed=11,
                begun=begun,
                put_part=put,
            )
        finally:
            pump.cancel()
            await asyncio.wait([pump])

    return asyncio.run(asyncio.wait_for(both(), 60))


def assert_begins_with(whole: Trajectory, begun: Trajectory) -> None:
    for name in ARRAY_FIELDS:
        assert getattr(whole, name)[: begun.num_tokens].tobytes() == getattr(begun, name).tobytes(), name
    assert whole.messages[: len(begun.messages)] == begun.messages
    last = len(begun.turns) - 1
    assert whole.turns[:last] == begun.turns[:last]
    assert (whole.turns[last].role, whole.turns[last].start) == (begun.turns[last].role, begun.turns[last].start)
