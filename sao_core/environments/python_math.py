r"""Mathematical problems with a Python session to call: think, compute, and end with ``\boxed{answer}``.

Problems come from a JSON Lines file in the shape in which competition sets are published, or are made from a seed
(:mod:`sao_core.environments.math_problems`). The session keeps its variables from turn to turn of a rollout.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from sao_core.config import Section
from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    random_of,
)
from sao_core.environments.extras import require_installed, version_of
from sao_core.environments.math_answers import boxed, is_right
from sao_core.environments.math_problems import LEVELS, Problem, make_problem
from sao_core.environments.math_rows import read_problems
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.environments.row_tasks import RowTasks
from sao_core.environments.tools import ToolEnvironment, function, shortened
from sao_core.outside import CodeSession, Limits, Outside, Ran, StoppedBy
from sao_core.tool_calls import ToolCall, without_thinking
from sao_core.trajectory import Message, Role

INSTRUCTIONS = (
    "Solve the problem. You may run Python with the function `python`; variables stay from call to call. "
    "When you know the answer, write it as \\boxed{answer}."
)
PYTHON = function(
    "python",
    "Run Python code in a session that keeps its variables. Shows what the code prints and the value of its last line.",
    code="The Python code to run.",
)
_HELD_OUT_ONE_IN = 8


class PythonMathOptions(Section):
    """Settings of the `python_math` environment."""

    path: str | None = Field(
        None,
        description="A JSON Lines file: rows with `problem` (or `question`) and `answer`; optional `id`, `difficulty`, "
        "`solution`, `weight`. Empty: problems made from the seed, whose answers are whole numbers.",
    )
    evaluation_path: str | None = Field(
        None, description="A file of the same form that is only evaluated; empty: some rows of `path` are."
    )
    held_out_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the rows of `path` that is only evaluated, at least one, if there is no "
        "`evaluation_path`; the run's seed draws them.",
    )
    easiest: int = Field(
        2,
        ge=1,
        le=LEVELS,
        description="Lowest level of made problems: 1 has three numbers of one digit, for the tiny model; 2 is a line "
        "of arithmetic, then come number theory and counting.",
    )
    hardest: int = Field(
        LEVELS, ge=1, le=LEVELS, description="Highest level; all from `easiest` on come equally often."
    )
    train_tasks: int | None = Field(
        800,
        ge=1,
        description="Made training problems, gone through in shuffled epochs; empty draws a new one each time.",
    )
    instructions: bool = Field(
        True,
        description="Explain task and function in a system message; a warm-started tiny model knows them and saves "
        "the tokens.",
    )
    max_turns: int = Field(50, ge=1, description="Turns after which the environment ends an episode without an answer.")
    call_timeout_s: float = Field(10.0, gt=0, description="Wall time that one call may take, and the CPU time as well.")
    memory_mb: int = Field(512, ge=64, description="Memory that the session may use.")
    output_characters: int = Field(
        4000, ge=100, description="Of what a call shows; the middle of a longer output is left out."
    )
    guess: float = Field(
        0.4, ge=0, le=1, description="How often the demonstrator guesses the answer, wrongly, without running anything."
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if self.hardest < self.easiest:
            raise ValueError(f"hardest must be at least easiest ({self.easiest}): got {self.hardest}")
        if self.evaluation_path is not None and self.path is None:
            raise ValueError(f"evaluation_path needs a path to train on: got {self.evaluation_path!r} alone")
        return self


class PythonMath(ToolEnvironment):
    """One problem. A turn without a call is the answer: reward 1 if what it boxes is right, else 0.

    A call that breaks a limit ends the session and is told; the next call starts a fresh one.
    """

    version: ClassVar[str] = f"1, math-verify {version_of('math-verify')}"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = (PYTHON,)

    def __init__(self, options: PythonMathOptions, outside: Outside) -> None:
        super().__init__(options.max_turns, show_tools=options.instructions)
        self._options = options
        self._code = outside.code
        self._answer: str | None = None
        self._session: CodeSession | None = None
        self._cells: list[tuple[str, str]] = []

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Ask the question."""
        self._answer = str(task.data["answer"])
        return _opening(task, self._options)

    async def call(self, call: ToolCall) -> str:
        """Run a cell; what it prints, with the traceback if it raised."""
        code = str(call.arguments["code"])
        ran = await self._run(code)
        if ran.exit_code is None:
            await self.close()
            limit = "a limit" if ran.stopped_by is None else f"the limit on {_LIMITED[ran.stopped_by]}"
            shown = f"{ran.stdout}\nerror: the session broke {limit} and is gone; the next call starts a new one"
        else:
            self._cells.append((code, _digest(ran)))
            shown = "\n".join(filter(None, (ran.stdout.rstrip(), ran.stderr.rstrip())))
        return shortened(shown.strip(), self._options.output_characters) or "(nothing was printed)"

    async def answer(self, text: str) -> StepResult:
        """Judge the answer; a turn that boxes none is a malformed one."""
        if self._answer is None:
            raise RuntimeError("reset comes before step")
        given = boxed(without_thinking(text))
        right = given is not None and await is_right(given, self._answer, self._code)
        parts = {"correct": float(right), "malformed": float(given is None)}
        return StepResult(reward=float(right), terminated=True, info={"reward_parts": parts})

    def state(self) -> dict[str, Any]:
        """The cells that made the session, each with a digest of what it showed, and the turns."""
        return {"turns": self.turns, "cells": self._cells}

    async def restore(self, task: Task, state: dict[str, Any]) -> None:
        """Run the cells again; raises RuntimeError if one shows something else, e.g. a random number, than it did."""
        self._answer = str(task.data["answer"])
        self.turns = state["turns"]
        for number, (code, digest) in enumerate(state["cells"], start=1):
            ran = await self._run(code)
            if _digest(ran) != digest:
                raise RuntimeError(f"call {number} of the session gave another result when it was run again")
            self._cells.append((code, digest))

    async def close(self) -> None:
        """Kill the session."""
        session, self._session, self._cells = self._session, None, []
        if session is not None:
            await session.close()

    async def _run(self, code: str) -> Ran:
        seconds = self._options.call_timeout_s
        if self._session is None:
            # CPU time counts over the session's life, which is as long as the rollout.
            limits = Limits(
                wall_s=seconds,
                cpu_s=seconds * self._options.max_turns,
                memory_bytes=self._options.memory_mb * 2**20,
            )
            self._session = await self._code.open(limits)
        ran = await self._session.run(code, seconds)
        if ran.stopped_by is StoppedBy.SANDBOX:
            raise RuntimeError(f"the sandbox broke: {ran.stderr.strip()[-200:] or 'no reason given'}")
        return ran


_LIMITED = {
    StoppedBy.WALL: "time",
    StoppedBy.CPU: "CPU time",
    StoppedBy.MEMORY: "memory",
    StoppedBy.OUTPUT: "output",
}


def _digest(ran: Ran) -> str:
    return hashlib.sha256(f"{ran.exit_code}\n{ran.stdout}".encode(errors="replace")).hexdigest()[:16]


class MadeProblems(NumberedTasks):
    """Problems from a seed. One is held out by what it asks, so none is both trained on and evaluated."""

    def __init__(self, options: PythonMathOptions, seed: int) -> None:
        self._options = options
        super().__init__("python_math", seed, options.train_tasks)

    def task(self, key: str) -> Task:
        """Make the problem of a key; raises KeyError if this source did not give it out."""
        level, problem = self.problem(key)
        return Task(key, str(level), {"problem": problem.question, "answer": str(problem.answer)})

    def problem(self, key: str) -> tuple[int, Problem]:
        """Level and problem of a key; raises KeyError."""
        split, index = self.split_and_number(key)
        levels = self._options.hardest - self._options.easiest + 1
        level = self._options.easiest + index % levels
        rng = random_of("python_math", self._seed, key)
        while True:
            problem = make_problem(rng, level)
            held_out = random_of("held out", problem.question).randrange(_HELD_OUT_ONE_IN) == 0
            if held_out == (split == "evaluation"):
                return level, problem


def demonstrations(options: PythonMathOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` made problems as solved by a demonstrator that computes, or guesses wrongly without computing.

    A policy that imitates it has something left to learn: to run Python every time.
    """
    source = MadeProblems(options, seed)
    shown = {"tools": [PYTHON]} if options.instructions else {}
    for index in range(count):
        key = f"demonstration/{index}"
        _, problem = source.problem(key)
        first, *rest = _opening(source.task(key), options)
        opening = (Message(first.role, first.content, shown), *rest)
        rng = random_of("demonstrator", seed, index)
        if rng.random() < options.guess:
            yield (*opening, _boxing(_guess(problem.answer, rng)))
        else:
            call = {"type": "function", "function": {"name": "python", "arguments": {"code": problem.program}}}
            yield (
                *opening,
                Message(Role.ASSISTANT, "", {"tool_calls": [call]}),
                Message(Role.TOOL, str(problem.answer), {"name": "python", "tool_call_id": "call00000"}),
                _boxing(problem.answer),
            )


def _boxing(answer: int) -> Message:
    return Message(Role.ASSISTANT, f"\\boxed{{{answer}}}")


def _guess(answer: int, rng: random.Random) -> int:
    """A wrong answer of the right size."""
    return answer + rng.choice((-1, 1)) * rng.randint(1, max(1, abs(answer) // 10))


def _opening(task: Task, options: PythonMathOptions) -> tuple[Message, ...]:
    question = Message(Role.USER, str(task.data["problem"]))
    return (Message(Role.SYSTEM, INSTRUCTIONS), question) if options.instructions else (question,)


def _make(options: Any, outside: Outside) -> Environment:
    require_installed("math_verify", "python_math", "math")
    return PythonMath(options, outside)


def _tasks(options: Any, seed: int) -> TaskSource:
    require_installed("math_verify", "python_math", "math")
    if options.path is None:
        return MadeProblems(options, seed)
    rows, weights = read_problems(options.path, "row", "environment.options.path")
    held = None
    if options.evaluation_path is not None:
        held, _ = read_problems(options.evaluation_path, "held", "environment.options.evaluation_path")
    return RowTasks(rows, weights, held, options.held_out_fraction, path=options.path, seed=seed)


SPEC = EnvironmentSpec(
    name="python_math",
    options_model=PythonMathOptions,
    make=_make,
    tasks=_tasks,
    demonstrations=demonstrations,
)
