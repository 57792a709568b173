"""Rollouts in parts with the real engine and the real calculator: the same as uninterrupted ones."""

import asyncio
import json
import time
from typing import Any, ClassVar

import numpy as np
import pytest
from parts_fixtures import assert_begins_with, play
from rollout_fixtures import full_forward, letter_tokenizer, model_folder, request, small_model

from sao_core.environments.base import Environment, StepResult, Task
from sao_core.environments.calculator import Calculator, CalculatorOptions
from sao_core.rollout.engine import Sampled
from sao_core.rollout.parts import RolloutPart, join
from sao_core.rollout.renderer import Renderer
from sao_core.rollout.transformers_engine import TransformersEngine
from sao_core.trajectory import ARRAY_FIELDS, Message, Role, Trajectory

LETTERS = letter_tokenizer()


class Echo(Environment):
    """Three turns, worth 0.25 each; its state is how many there were."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return (Message(Role.USER, "abc"),)

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        return StepResult((Message(Role.TOOL, "abcdef"[self.turns :]),), 0.25, terminated=self.turns == 3)

    def state(self) -> Any:
        return self.turns

    async def restore(self, task: Task, state: Any) -> None:
        self.turns = state


def model() -> Any:
    return small_model(vocabulary=len(LETTERS), spread=0.1)


def engine(context: int = 160) -> TransformersEngine:
    return TransformersEngine(model(), 1, slots=1, context=context)


def real(attempt: int, **more: Any) -> Trajectory:
    limits = {"max_action_tokens": 120, "max_context_tokens": 160, "max_turns": 4}
    (t,) = play(engine(), Echo(), renderer=Renderer(LETTERS), attempt=attempt, **limits | more)
    return t


def parts_of(attempt: int) -> tuple[Trajectory, list[RolloutPart]]:
    parts: list[RolloutPart] = []
    return real(attempt, put=lambda part: parts.append(part) is None), parts


def test_sampling_in_stretches_gives_the_same_rollout_bit_for_bit() -> None:
    seen = set()
    for attempt in range(1, 6):
        whole = real(attempt)
        cut, parts = parts_of(attempt)
        assert len(parts) >= cut.num_action_tokens - cut.num_turns - 1 > 0
        for name in ARRAY_FIELDS:
            assert getattr(whole, name).tobytes() == getattr(cut, name).tobytes()
        assert (whole.turns, whole.messages, whole.outcome) == (cut.turns, cut.messages, cut.outcome)
        assert_begins_with(cut, join(parts).segments[0])
        seen.add(cut.num_turns)
    assert 3 in seen


def test_stretches_give_the_same_tokens_across_a_swap(tmp_path: Any) -> None:
    other = model_folder(tmp_path / "other", seed=3)

    def sample(stretch: bool) -> tuple[list[int], bytes, list[int]]:
        ours = TransformersEngine(small_model(), 1, slots=1, context=64)

        async def both() -> list[Sampled]:
            async def swap() -> None:
                while ours.stats.sampled_tokens < 9:
                    await asyncio.sleep(0)
                await ours.swap(other, 2)

            tasks = [asyncio.create_task(ours.run()), asyncio.create_task(swap())]
            session = ours.open(request().sampling, 7)
            got = [await session.extend_and_sample([3, 5, 8], {-2}, 20, time.monotonic() - 1 if stretch else None)]
            while sum(len(one.token_ids) for one in got) < 20:
                left = 20 - sum(len(one.token_ids) for one in got)
                got.append(await session.extend_and_sample([], {-2}, left, time.monotonic() - 1))
            tasks[0].cancel()
            await asyncio.wait(tasks)
            return got

        got = asyncio.run(asyncio.wait_for(both(), 60))
        assert len(got) == (20 if stretch else 1)
        ids, logprobs, versions = (
            np.concatenate([getattr(one, name) for one in got]) for name in ("token_ids", "logprobs", "versions")
        )
        return ids.tolist(), logprobs.tobytes(), versions.tolist()

    whole = sample(stretch=False)
    assert sample(stretch=True) == whole
    assert whole[2] == [1] * 9 + [2] * 11


def test_what_is_sampled_after_going_on_is_what_the_policy_says_there() -> None:
    going_on = 0
    for attempt in range(1, 4):
        _, parts = parts_of(attempt)
        for count in (1, len(parts) // 2, len(parts)):
            begun = join(parts[:count])
            t = real(attempt + 10, begun=begun)
            assert_begins_with(t, begun.segments[0])
            mask = t.action_mask
            expected = full_forward(model(), t.token_ids)[mask]
            np.testing.assert_allclose(t.behavior_logprobs[mask], expected, atol=1e-4)
            going_on += t.num_action_tokens > begun.segments[0].num_action_tokens
    assert going_on == 9


def test_a_restored_calculator_plays_on_like_one_that_was_never_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def remember(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("sao_core.environments.calculator.asyncio.sleep", remember)
    options = CalculatorOptions(tool_latency_mean_s=0.1, max_turns=5)
    task = Task("train/1", "2", {"question": "solve 7 times 3 minus 4", "result": 17})
    actions = ["calc: 7*3", "calc: 7*", "hm", "calc: 21-4", "answer: 17"]

    async def episode(interrupted_after: int | None) -> list[StepResult]:
        environment = Calculator(options)
        await environment.reset(task)
        results = []
        for number, action in enumerate(actions):
            if number == interrupted_after:
                state = json.loads(json.dumps(environment.state()))
                environment = Calculator(options)
                await environment.restore(task, state)
            results.append(await environment.step(action))
        return results

    whole = asyncio.run(episode(None))
    expected, waits = waits, []
    monkeypatch.setattr("sao_core.environments.calculator.asyncio.sleep", remember)
    assert whole[-1].info["reward_parts"] == {"correct": 1.0, "calls": 2.0, "malformed": 2.0}
    assert len(set(expected)) == 3
    for after in range(5):
        waits.clear()
        assert asyncio.run(episode(after)) == whole
        assert waits == expected
