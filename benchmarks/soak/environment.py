"""The soak's environment: episodes of very different lengths over tools of very different speeds, cheap to compute.

Every turn shows a digit, so many times; the policy should answer with it once. The turns of a task have a heavy tail:
half of them take at most six, one in ten more than sixty. Everything about an episode follows from its task, which
makes its length known before anything has happened to it, and its state two numbers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from sao_core.config import Section
from sao_core.environments.base import Environment, EnvironmentSpec, StepResult, Task, TaskSource, random_of
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

DIGITS = 10
TOKENS_AROUND_A_TURN = 5
"""Role and end of what is shown, the policy's role, its digit and its end."""
DEMONSTRATED_TURNS = 4
TAIL = 0.5
"""Exponent of the bounded Pareto distribution of turns: P(more than n) falls as n^−0.5."""
RIGHT_DEMONSTRATIONS = 0.6
"""How often the demonstrator is right, which leaves reinforcement learning something to do."""


class EchoOptions(Section):
    """Settings of the echo environment."""

    min_turns: int = Field(2, ge=1, description="Turns of the shortest task.")
    max_turns: int = Field(300, ge=1, description="Turns of the longest task.")
    max_repeats: int = Field(21, ge=1, description="How often a turn shows its digit at most.")
    tool_latency_mean_s: float = Field(0.05, ge=0, description="Mean time that a turn's tool takes.")
    tool_latency_sigma: float = Field(1.5, ge=0, description="σ of the logarithm of that time.")


class Echo(Environment):
    """One task. The score is the share of turns that were answered right."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: EchoOptions) -> None:
        self._options = options
        self._turn = 0
        self._right = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Show the first digit."""
        self._begin(task)
        return (self._shown(Role.USER),)

    def state(self) -> Mapping[str, int]:
        """The turn that is next, and how many were right."""
        return {"turn": self._turn, "right": self._right}

    async def restore(self, task: Task, state: Mapping[str, Any]) -> None:
        """Be the episode that :meth:`state` described."""
        self._begin(task)
        self._turn, self._right = int(state["turn"]), int(state["right"])

    async def step(self, action: str) -> StepResult:
        """Judge an answer, after a while."""
        right = action.strip() == str(self._digits[self._turn])
        self._right += right
        self._turn += 1
        await self._wait()
        reward = right / len(self._digits)
        if self._turn == len(self._digits):
            return StepResult(reward=reward, terminated=True)
        return StepResult(reward=reward, observation=(self._shown(Role.TOOL),))

    def _begin(self, task: Task) -> None:
        self._key = task.key
        self._digits = task.data["digits"]
        self._repeats = task.data["repeats"]

    def _shown(self, role: Role) -> Message:
        return Message(role, str(self._digits[self._turn]) * self._repeats)

    async def _wait(self) -> None:
        mean, sigma = self._options.tool_latency_mean_s, self._options.tool_latency_sigma
        if mean > 0:
            latency = random_of("latency", self._key, self._turn)
            await asyncio.sleep(latency.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))


class EchoTasks(TaskSource):
    """Endless tasks; each is a function of seed and key."""

    def __init__(self, options: EchoOptions, seed: int) -> None:
        self._options = options
        self._seed = seed

    def key_at(self, position: int) -> str:
        """``train/N``: a new task each time."""
        return f"train/{position}"

    def evaluation_keys(self, count: int) -> list[str]:
        """``evaluation/0 …``."""
        return [f"evaluation/{index}" for index in range(count)]

    def task(self, key: str) -> Task:
        """Draw the lengths and the digits of a key."""
        rng = random_of("echo", self._seed, key)
        turns = heavy_tailed(rng, self._options.min_turns, self._options.max_turns)
        repeats = log_uniform(rng, 1, self._options.max_repeats)
        digits = [rng.randrange(DIGITS) for _ in range(turns)]
        return Task(key=key, difficulty="", data={"digits": digits, "repeats": repeats})


def planned_tokens(task: Task) -> int:
    """Tokens of a rollout of ``task`` in which every answer is one digit: what its length is taken to be."""
    return len(task.data["digits"]) * (task.data["repeats"] + TOKENS_AROUND_A_TURN)


def heavy_tailed(rng: random.Random, low: int, high: int) -> int:
    """A whole number in ``low … high`` from a bounded Pareto distribution, by its inverse."""
    first, last = low**-TAIL, (high + 1) ** -TAIL
    return min(high, math.floor(rng.uniform(last, first) ** (-1 / TAIL)))


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A whole number in ``low … high`` whose logarithm is uniform."""
    return min(high, math.floor(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def demonstrations(options: EchoOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` conversations of a few turns by a demonstrator that is often one too high."""
    for index in range(count):
        rng = random_of("echo demonstration", seed, index)
        repeats = log_uniform(rng, 1, options.max_repeats)
        messages: list[Message] = []
        for turn in range(DEMONSTRATED_TURNS):
            digit = rng.randrange(DIGITS)
            said = digit if rng.random() < RIGHT_DEMONSTRATIONS else (digit + 1) % DIGITS
            messages.append(Message(Role.TOOL if turn else Role.USER, str(digit) * repeats))
            messages.append(Message(Role.ASSISTANT, str(said)))
        yield tuple(messages)


def _make(options: Any, outside: Outside) -> Environment:
    return Echo(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return EchoTasks(options, seed)


SPEC = EnvironmentSpec(name="echo", options_model=EchoOptions, make=_make, tasks=_tasks, demonstrations=demonstrations)
