"""The calculator agent: a worded arithmetic question, a calculator to call, a verified answer.

The policy writes ``calc: 7*3-4``, reads the result, and ends with ``answer: 17``. Questions take one
to four operations. The demonstrator is imperfect on purpose (:func:`demonstrations`), so that a
policy that imitates it leaves reinforcement learning something to change.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from sao_core.config import Section
from sao_core.environments.arithmetic import MalformedExpression, evaluate
from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    random_of,
)
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

MAX_OPERATIONS = 4
WORDS = {"+": "plus", "-": "minus", "*": "times"}
MISREAD_AS = {"+": "-", "-": "*", "*": "+"}
"""What the demonstrator takes an operator for when it misreads one: always the same wrong one."""
OPENINGS = ("compute", "find", "solve")
INSTRUCTIONS = (
    "You may use a calculator. To call it, write `calc: ` and an expression such as `7*3-4`. "
    "When you know the result, write `answer: ` and the number."
)
_HELD_OUT_ONE_IN = 8


class CalculatorOptions(Section):
    """Settings of the calculator environment."""

    max_operations: int = Field(
        MAX_OPERATIONS, ge=1, le=MAX_OPERATIONS, description="Questions take 1 … this many operations, equally often."
    )
    max_operand: int = Field(9, le=999, description="Operands are 1 … this number, all different in one question.")
    train_tasks: int | None = Field(
        None,
        ge=1,
        description="Distinct training questions, gone through in shuffled epochs; empty draws a new one each time. "
        "Baselines that keep a mean per prompt need questions that come back.",
    )
    instructions: bool = Field(
        False, description="Explain the calculator in a system message; a warm-started model knows it already."
    )
    max_turns: int = Field(6, ge=1, description="Turns after which the environment ends an episode without an answer.")
    misread: tuple[float, ...] = Field(
        (0.12, 0.52, 0.72, 0.75),
        description="How often the demonstrator misreads the last operator, by number of operations.",
    )
    careless: tuple[float, ...] = Field(
        (0.0, 0.1, 0.5, 0.65),
        description="How often it misreads one of the operators before the last as well, by number of operations.",
    )
    tool_latency_mean_s: float = Field(
        0.0, ge=0, description="Mean time that a calculator call takes; 0 answers at once."
    )
    tool_latency_sigma: float = Field(1.0, ge=0, description="σ of the logarithm of that time (log-normal).")

    @model_validator(mode="after")
    def _questions_can_be_made(self) -> Self:
        if self.max_operand <= self.max_operations:
            raise ValueError(
                f"max_operand must be at least {self.max_operations + 1}, since the operands of a question differ: "
                f"got {self.max_operand}"
            )
        for name in ("misread", "careless"):
            rates = getattr(self, name)
            if len(rates) < self.max_operations:
                raise ValueError(f"{name} needs a rate for each of 1 … {self.max_operations} operations: got {rates}")
            if not all(0 <= rate <= 1 for rate in rates):
                raise ValueError(f"{name} must hold probabilities: got {rates}")
        return self


class Calculator(Environment):
    """One question. Reward 1 for the right answer in the last turn, 0 for anything else."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options
        self._key = ""
        self._result: int | None = None
        self._turns = 0
        self._calls = 0
        self._malformed = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask the question."""
        self._begin(task)
        return _opening(task, self._options)

    async def step(self, action: str) -> StepResult:
        """A calculator call, an answer, or something malformed, which costs a turn and is told."""
        if self._result is None:
            raise RuntimeError("reset comes before step")
        self._turns += 1
        verb, _, content = action.strip().partition(":")
        content = content.strip()
        if verb == "answer" and re.fullmatch(r"-?[0-9]{1,12}", content):
            return self._end(float(int(content) == self._result), terminated=True)
        if verb == "calc":
            try:
                shown = str(evaluate(content))
                self._calls += 1
            except MalformedExpression as error:
                shown = f"error: {error}"
                self._malformed += 1
            await self._wait()
        else:
            shown = "error: write calc: or answer:"
            self._malformed += 1
        if self._turns >= self._options.max_turns:
            return self._end(0.0, terminated=False)
        return StepResult(observation=(Message(Role.TOOL, shown),))

    def state(self) -> dict[str, int]:
        """Counts of turns, calls and malformed actions; everything else follows from the task."""
        return {"turns": self._turns, "calls": self._calls, "malformed": self._malformed}

    async def restore(self, task: Task, state: dict[str, int]) -> None:
        """Go on with the question after that many turns."""
        self._begin(task)
        self._turns, self._calls, self._malformed = state["turns"], state["calls"], state["malformed"]

    def _begin(self, task: Task) -> None:
        if self._result is not None:
            raise RuntimeError("an environment serves one episode: make a new one")
        self._key, self._result = task.key, int(task.data["result"])

    def _end(self, reward: float, terminated: bool) -> StepResult:
        parts = {"correct": reward, "calls": float(self._calls), "malformed": float(self._malformed)}
        return StepResult(reward=reward, terminated=terminated, truncated=not terminated, info={"reward_parts": parts})

    async def _wait(self) -> None:
        mean, sigma = self._options.tool_latency_mean_s, self._options.tool_latency_sigma
        if mean > 0:
            latency = random_of("latency", self._key, self._turns)
            await asyncio.sleep(latency.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))


class CalculatorTasks(NumberedTasks):
    """Questions from a seed. A question is held out by what it asks, so none is both trained on and evaluated."""

    def __init__(self, options: CalculatorOptions, seed: int) -> None:
        self._options = options
        super().__init__("calculator", seed, options.train_tasks)

    def task(self, key: str) -> Task:
        """Build the question of a key; raises KeyError if this source did not give it out."""
        split, index = self.split_and_number(key)
        operations = 1 + index % self._options.max_operations
        rng = random_of("question", self._seed, key)
        while True:
            operands, operators = _draw(rng, operations, self._options.max_operand)
            expression = _expression(operands, operators)
            held_out = random_of("held out", expression).randrange(_HELD_OUT_ONE_IN) == 0
            if held_out == (split == "evaluation"):
                break
        worded = "".join(f" {WORDS.get(part, part)}" for part in _interleave(operands, operators))
        return Task(
            key=key,
            difficulty=str(operations),
            data={
                "question": rng.choice(OPENINGS) + worded,
                "operands": operands,
                "operators": operators,
                "result": evaluate(expression),
            },
        )


def _draw(rng: random.Random, operations: int, max_operand: int) -> tuple[list[int], list[str]]:
    """A question whose last operator matters: misread, it gives another result."""
    while True:
        operands = rng.sample(range(1, max_operand + 1), operations + 1)
        operators = [rng.choice("+-*") for _ in range(operations)]
        misread = [*operators[:-1], MISREAD_AS[operators[-1]]]
        if evaluate(_expression(operands, operators)) != evaluate(_expression(operands, misread)):
            return operands, operators


def _interleave(operands: list[int], operators: list[str]) -> Iterator[str]:
    yield str(operands[0])
    for symbol, operand in zip(operators, operands[1:], strict=True):
        yield symbol
        yield str(operand)


def _expression(operands: list[int], operators: list[str]) -> str:
    return "".join(_interleave(operands, operators))


def _opening(task: Task, options: CalculatorOptions) -> tuple[Message, ...]:
    question = Message(Role.USER, str(task.data["question"]))
    return (Message(Role.SYSTEM, INSTRUCTIONS), question) if options.instructions else (question,)


def demonstrations(options: CalculatorOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` questions as solved by a demonstrator that misreads operators, more often in harder questions.

    The mistake is systematic: an operator is always taken for the same other one (:data:`MISREAD_AS`), it is mostly
    the last one, and on hard questions that is the usual reading. Numbers and results are always copied faithfully.
    """
    tasks = CalculatorTasks(options, seed)
    for index in range(count):
        task = tasks.task(f"demonstration/{index}")
        rng = random_of("demonstrator", seed, index)
        operators = list(task.data["operators"])
        level = len(operators) - 1
        if rng.random() < options.misread[level]:
            operators[-1] = MISREAD_AS[operators[-1]]
        if level and rng.random() < options.careless[level]:
            place = rng.randrange(level)
            operators[place] = MISREAD_AS[operators[place]]
        expression = _expression(task.data["operands"], operators)
        result = str(evaluate(expression))
        yield (
            *_opening(task, options),
            Message(Role.ASSISTANT, f"calc: {expression}"),
            Message(Role.TOOL, result),
            Message(Role.ASSISTANT, f"answer: {result}"),
        )


def _make(options: Any, outside: Outside) -> Environment:
    return Calculator(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return CalculatorTasks(options, seed)


SPEC = EnvironmentSpec(
    name="calculator", options_model=CalculatorOptions, make=_make, tasks=_tasks, demonstrations=demonstrations
)
