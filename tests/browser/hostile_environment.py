"""An environment whose every text attacks whoever shows it: prompts, observations, labels of difficulty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from attacks import ATTACKS

from sao_core.config import Section
from sao_core.environments import Environment, EnvironmentSpec, StepResult, Task, TaskSource
from sao_core.trajectory import Message, Role


class Hostile(Environment):
    """Two turns, with an observation between them."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    _turns = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return (Message(Role.USER, task.data["question"]),)

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        if self._turns == 2:
            return StepResult(reward=float(len(action) % 2), terminated=True)
        return StepResult(observation=(Message(Role.TOOL, ATTACKS[0]),))


class HostileTasks(TaskSource):
    """The attacks, one after the other, as questions; a label attacks as well."""

    def key_at(self, position: int) -> str:
        return f"train/{position}"

    def evaluation_keys(self, count: int) -> list[str]:
        return [f"evaluation/{index}" for index in range(count)]

    def task(self, key: str) -> Task:
        attack = ATTACKS[int(key.partition("/")[2]) % len(ATTACKS)]
        return Task(key, difficulty=attack, data={"question": attack})


class NoOptions(Section):
    """None."""


def demonstrations(options: Any, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    for index in range(count):
        attack = ATTACKS[index % len(ATTACKS)]
        yield (Message(Role.USER, attack), Message(Role.ASSISTANT, attack))


SPEC = EnvironmentSpec(
    name="hostile",
    options_model=NoOptions,
    make=lambda options, outside: Hostile(),
    tasks=lambda options, seed: HostileTasks(),
    demonstrations=demonstrations,
)
