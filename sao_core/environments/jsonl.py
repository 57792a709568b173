"""Your own questions: a JSON Lines file of prompts and answers, judged by comparison or by your own function.

A row has ``messages`` (the opening of a conversation) or ``prompt`` (one user message), and ``answer``; if they are
there, rewards are reported by its ``difficulty``, and its ``weight`` says how often it comes. Held out are the rows of
a file of their own, or some that the seed draws.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from sao_core.config import ConfigError, Section
from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    load_object,
)
from sao_core.environments.one_thread import in_own_thread
from sao_core.environments.row_tasks import RowTasks
from sao_core.environments.single_turn import SingleTurn
from sao_core.jsonl_rows import messages_of, read_rows, weight_of
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""Text of the policy's turn and the row as it stands in the file → reward in [0, 1]."""


class JsonlOptions(Section):
    """Settings of the `jsonl` environment."""

    path: str = Field(description="The JSON Lines file: rows with `messages` or `prompt`, and `answer`.")
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
    extract: str = Field(
        r"(?is)(?:.*answer\s*[:=]\s*)?(.+)",
        description="Regular expression, matched from the start of the reply, whose first group is the answer; "
        "the default takes what follows the last `answer:`, or the whole reply.",
    )
    reward: str | None = Field(
        None,
        description="Your function as `module:function`: (reply text, row) → reward from 0 to 1, instead of comparing.",
    )

    @field_validator("extract")
    @classmethod
    def _extract_is_a_regular_expression_with_a_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"must be a regular expression: got {value!r} ({error})") from None
        if not groups:
            raise ValueError(f"must have a group in parentheses around the answer: got {value!r}")
        return value


def normalise(text: str) -> str:
    """What two answers are compared by: case, runs of space and a final full stop do not count."""
    return " ".join(text.split()).rstrip(".").strip().casefold()


class Jsonl(SingleTurn):
    """One question, one turn."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: JsonlOptions) -> None:
        self._options = options
        self._reward = None if options.reward is None else _reward_function(options.reward)

    async def judge(self, task: Task, reply: str) -> StepResult:
        """Judge the reply."""
        row = task.data["row"]
        if self._reward is not None:
            reward = float(await in_own_thread(self._reward, reply, row))
            if not (math.isfinite(reward) and 0 <= reward <= 1):
                raise ValueError(f"{self._options.reward} must return a reward from 0 to 1: got {reward}")
        else:
            match = re.match(self._options.extract, reply.strip())
            given = match.group(1) if match and match.group(1) is not None else ""
            reward = float(normalise(given) == normalise(str(row["answer"])))
        return StepResult(reward=reward, terminated=True, info={"reward_parts": {"correct": reward}})


def _reward_function(path: str) -> RewardFunction:
    function = load_object(path, "environment.options.reward")
    if not callable(function):
        raise ConfigError(f"environment.options.reward must name a function: got {type(function).__name__} at `{path}`")
    checked: RewardFunction = function
    return checked


class JsonlTasks(RowTasks):
    """The rows of a file (keys ``row/NUMBER``) and of its evaluation file (``held/NUMBER``), all checked on reading."""

    def __init__(self, options: JsonlOptions, seed: int, *, answers: bool = True) -> None:
        """``answers`` says that a row without one is an error."""
        if options.reward is not None:
            _reward_function(options.reward)
        rows, weights = _read(options.path, "row", "environment.options.path", answers)
        held = None
        if options.evaluation_path is not None:
            held, _ = _read(options.evaluation_path, "held", "environment.options.evaluation_path", answers)
        super().__init__(rows, weights, held, options.held_out_fraction, path=options.path, seed=seed)


def _read(path: str, split: str, setting: str, answers: bool) -> tuple[list[Task], list[float]]:
    """All rows as tasks, and their weights; raises ConfigError naming file, line and field of the first bad one."""
    tasks, weights = [], []
    for index, (where, row) in enumerate(read_rows(Path(path), setting)):
        if answers and row.get("answer") is None:
            raise ConfigError(f"{where}: the row has no `answer`")
        if "messages" in row:
            messages = messages_of(row, where)
            if messages[-1].role is Role.ASSISTANT:
                raise ConfigError(
                    f"{where}: `messages` must end before the assistant's turn; its answer goes in `answer`"
                )
        elif isinstance(row.get("prompt"), str):
            messages = (Message(Role.USER, row["prompt"]),)
        else:
            raise ConfigError(f"{where}: the row needs `messages` or a text `prompt`")
        weights.append(weight_of(row, where))
        difficulty = str(row.get("difficulty", ""))
        tasks.append(Task(f"{split}/{index}", difficulty, {"messages": messages, "row": row}))
    return tasks, weights


def _make(options: Any, outside: Outside) -> Environment:
    return Jsonl(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return JsonlTasks(options, seed)


SPEC = EnvironmentSpec(name="jsonl", options_model=JsonlOptions, make=_make, tasks=_tasks)
