"""A short dialogue in which every turn earns a reward: name the smallest of the numbers that are left, until none is.

Made for one question: what do rewards of single turns change? `reward: dense` gives each right turn its share at
once, `reward: final` the same sum with the last turn. It uses no tool and takes as many turns as there are numbers.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sao_core.config import Section
from sao_core.environments.base import Environment, EnvironmentSpec, StepResult, Task, TaskSource, random_of
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

INSTRUCTIONS = "You get some numbers. Name the smallest, and nothing else; then the smallest of those that are left."
_HELD_OUT_ONE_IN = 8
_NUMBER = re.compile(r"-?[0-9]{1,12}")


class SortingOptions(Section):
    """Settings of the `sorting` environment."""

    fewest: int = Field(3, ge=1, description="Numbers of the shortest dialogues; a dialogue has a turn for each.")
    most: int = Field(5, ge=1, description="Numbers of the longest dialogues; all lengths come equally often.")
    largest: int = Field(9, ge=1, le=999_999, description="Numbers are 1 … this, all different in one dialogue.")
    reward: Literal["dense", "final"] = Field(
        "dense", description="When right turns are rewarded, each with 1 ÷ turns: at once, or all with the last turn."
    )
    instructions: bool = Field(
        False, description="Explain the task in a system message; a warm-started model knows it already."
    )
    hasty: float = Field(
        0.6, ge=0, le=1, description="How often the demonstrator names the first number instead of the smallest."
    )

    @model_validator(mode="after")
    def _dialogues_can_be_made(self) -> Self:
        if self.most < self.fewest:
            raise ValueError(f"most must be at least fewest ({self.fewest}): got {self.most}")
        if self.largest <= self.most:
            raise ValueError(f"largest must exceed most ({self.most}), since numbers differ: got {self.largest}")
        return self


class Sorting(Environment):
    """One dialogue."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: SortingOptions) -> None:
        self._options = options
        self._left: list[int] = []
        self._turns = 0
        self._right = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Name the numbers."""
        self._begin(task)
        return _opening(self._left, self._options)

    async def step(self, action: str) -> StepResult:
        """Take a number, say whether it was the smallest, and go on without that one."""
        if not self._left:
            raise RuntimeError("reset comes before step")
        smallest = min(self._left)
        given = _NUMBER.fullmatch(action.strip().rstrip("."))
        right = given is not None and int(given.group()) == smallest
        self._left.remove(smallest)
        self._right += right
        if self._options.reward == "dense":
            reward = right / self._turns
        else:
            reward = 0.0 if self._left else self._right / self._turns
        parts = {"right": float(right), "malformed": float(given is None)}
        observation = (_told(right, smallest, self._left),) if self._left else ()
        return StepResult(observation, reward, terminated=not self._left, info={"reward_parts": parts})

    def state(self) -> dict[str, int]:
        """Turns to go and right ones so far; the numbers follow from the task."""
        return {"left": len(self._left), "right": self._right}

    async def restore(self, task: Task, state: dict[str, int]) -> None:
        """Go on with so many numbers left, which are the largest ones."""
        self._begin(task)
        for _ in range(len(self._left) - state["left"]):
            self._left.remove(min(self._left))
        self._right = state["right"]

    def _begin(self, task: Task) -> None:
        if self._turns:
            raise RuntimeError("an environment serves one episode: make a new one")
        self._left = list(task.data["numbers"])
        self._turns = len(self._left)


class SortingTasks(NumberedTasks):
    """Numbers from a seed. A dialogue is held out by its numbers in their order."""

    def __init__(self, options: SortingOptions, seed: int) -> None:
        self._options = options
        super().__init__("sorting", seed)

    def task(self, key: str) -> Task:
        """Build the dialogue of a key; raises KeyError if this source did not give it out."""
        split, index = self.split_and_number(key)
        options = self._options
        count = options.fewest + index % (options.most - options.fewest + 1)
        rng = random_of("numbers", self._seed, key)
        while True:
            numbers = rng.sample(range(1, options.largest + 1), count)
            if (random_of("held out", *numbers).randrange(_HELD_OUT_ONE_IN) == 0) == (split == "evaluation"):
                return Task(key=key, difficulty=str(count), data={"numbers": numbers})


def _opening(numbers: Sequence[int], options: SortingOptions) -> tuple[Message, ...]:
    asked = Message(Role.USER, _listed(numbers))
    return (Message(Role.SYSTEM, INSTRUCTIONS), asked) if options.instructions else (asked,)


def _told(right: bool, smallest: int, left: Sequence[int]) -> Message:
    verdict = "right" if right else f"no {smallest}"
    return Message(Role.USER, f"{verdict}, left {_listed(left)}")


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def demonstrations(options: SortingOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` dialogues by someone hasty, who often names the first number: there is better to find."""
    tasks = SortingTasks(options, seed)
    for index in range(count):
        numbers = list(tasks.task(f"demonstration/{index}").data["numbers"])
        rng = random_of("sorter", seed, index)
        messages = list(_opening(numbers, options))
        while numbers:
            smallest = min(numbers)
            said = _say(numbers, options, rng)
            numbers.remove(smallest)
            messages.append(Message(Role.ASSISTANT, str(said)))
            if numbers:
                messages.append(_told(said == smallest, smallest, numbers))
        yield tuple(messages)


def _say(numbers: Sequence[int], options: SortingOptions, rng: random.Random) -> int:
    return numbers[0] if rng.random() < options.hasty else min(numbers)


def _make(options: Any, outside: Outside) -> Environment:
    return Sorting(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return SortingTasks(options, seed)


SPEC = EnvironmentSpec(
    name="sorting", options_model=SortingOptions, make=_make, tasks=_tasks, demonstrations=demonstrations
)
