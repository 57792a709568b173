"""An agent that you did not write: a program of its own is started for every rollout and asks the policy over HTTP.

The program needs to know an OpenAI base URL only. It gets a task, and leaves a reward, or what your function judges.
It is yours and trusted, and runs with your rights; what it does with code that the policy writes is its own business.
Nothing here starts it: see :mod:`sao_core.rollout.external`.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from sao_core.agent_programs import ProgramEnded
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
from sao_core.jsonl_rows import read_rows
from sao_core.outside import Outside
from sao_core.trajectory import Message

Judge = Callable[[Mapping[str, Any], ProgramEnded, Sequence[Message]], Any]
"""The row, what the program left, the conversation → a reward, or a mapping with `reward` and `parts`."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class UnusableResult(ValueError):
    """What a program left gives no reward; the message says why."""


class ExternalAgentOptions(Section):
    """Settings of the `external_agent` environment."""

    command: tuple[str, ...] = Field(
        min_length=1,
        description="The program and its arguments, as a list or a line of a shell. `python` is this interpreter, "
        "words that name a file are taken from the folder in which the run was started, and `{field}` is that field of "
        "the task. `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` say where the policy is; the file `SAO_TASK` "
        "holds the task, the file `SAO_RESULT` takes the reward.",
    )
    tasks: str = Field(description="A JSON Lines file of tasks: rows are objects that the program understands.")
    held_out_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the rows that is only evaluated, at least one; the run's seed draws them.",
    )
    reward: str | None = Field(
        None,
        description="Your function as `module:function`: (row, what the program left, messages) → reward, or an object "
        "with `reward` and `parts`. Empty: the program writes that object to `SAO_RESULT`, or prints it last.",
    )
    reward_range: tuple[float, float] = Field((0.0, 1.0), description="Smallest and largest reward.")
    version: str = Field("1", description="Change it whenever the same replies could earn another reward.")

    @field_validator("command", mode="before")
    @classmethod
    def _command_may_be_a_line(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("reward_range")
    @classmethod
    def _range_is_not_empty(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (math.isfinite(value[0]) and math.isfinite(value[1]) and value[0] < value[1]):
            raise ValueError(f"must be two numbers, the smaller one first: got {value}")
        return value

    @property
    def fields(self) -> tuple[str, ...]:
        """What of a task the command names."""
        return tuple(dict.fromkeys(name for word in self.command for name in _PLACEHOLDER.findall(word)))


class ExternalAgent(Environment):
    """One run of the program; a worker hands it to :func:`sao_core.rollout.external.run_external`."""

    def __init__(self, options: ExternalAgentOptions) -> None:
        self._options = options
        self.version = options.version  # type: ignore[misc]
        self.reward_range = options.reward_range  # type: ignore[misc]
        self._judge = None if options.reward is None else _judge(options.reward)

    def command(self, task: Task) -> list[str]:
        """The program and its arguments for a task."""
        row = task.data["row"]
        return [_PLACEHOLDER.sub(lambda name: _as_word(row[name[1]]), word) for word in self._options.command]

    async def judge(self, task: Task, ended: ProgramEnded, messages: Sequence[Message]) -> StepResult:
        """The reward of a program that ended by itself; raises :class:`UnusableResult` if there is none."""
        if ended.problem is not None:
            raise UnusableResult(f"the program cannot be started: {ended.problem}")
        if ended.exit_code != 0:
            raise UnusableResult(f"the program ended with {_status(ended.exit_code)}: {ended.last_words}")
        if self._judge is None:
            given = _printed(ended)
        else:
            try:
                given = await in_own_thread(self._judge, task.data["row"], ended, tuple(messages))
            except Exception as error:
                raise UnusableResult(f"{self._options.reward} raised {type(error).__name__}: {error}") from error
        return StepResult(terminated=True, **_checked(given, self._options.reward_range))

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Nothing: the program opens the conversation."""
        raise RuntimeError("an external agent takes no turns of the worker: see sao_core.rollout.external")

    async def step(self, action: str) -> StepResult:
        """Nothing: the program takes the turns."""
        raise RuntimeError("an external agent takes no turns of the worker: see sao_core.rollout.external")


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _status(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit code"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _printed(ended: ProgramEnded) -> Any:
    """What the program wrote to its result file, or else printed last."""
    if ended.result is not None:
        try:
            return json.loads(ended.result)
        except ValueError as error:
            raise UnusableResult(f"SAO_RESULT holds no JSON ({error}): {ended.result[:80]!r}") from None
    last = ended.stdout.strip().rpartition("\n")[2]
    try:
        given = json.loads(last)
    except ValueError:
        given = None
    if not isinstance(given, dict) or "reward" not in given:
        raise UnusableResult(
            "the program left no reward: it has to write an object with `reward` to the file that SAO_RESULT names, "
            f"or print it as its last line: got {last[:80]!r}"
        )
    return given


def _checked(given: Any, reward_range: tuple[float, float]) -> dict[str, Any]:
    """Reward and info of a step; raises :class:`UnusableResult` for what is no finite number in the range."""
    if not isinstance(given, Mapping):
        given = {"reward": given}
    parts = given.get("parts", {})
    if not isinstance(parts, Mapping):
        raise UnusableResult(f"`parts` must be an object of numbers: got {parts!r:.80}")
    for name, value in {"reward": given.get("reward"), **parts}.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UnusableResult(f"`{name}` must be a finite number: got {value!r:.80}")
    low, high = reward_range
    reward = float(given["reward"])
    if not low <= reward <= high:
        raise UnusableResult(f"reward {reward:.6g} is outside environment.options.reward_range {low:g}…{high:g}")
    return {"reward": reward, "info": {"reward_parts": {str(name): float(value) for name, value in parts.items()}}}


def _judge(path: str) -> Judge:
    function = load_object(path, "environment.options.reward")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"environment.options.reward must name a plain function: got {type(function).__name__} at `{path}`"
        )
    judge: Judge = function
    return judge


class ExternalTasks(RowTasks):
    """The rows of a file, keys ``row/NUMBER``; some are held out."""

    def __init__(self, options: ExternalAgentOptions, seed: int) -> None:
        if options.reward is not None:
            _judge(options.reward)
        tasks = _read(options)
        super().__init__(
            tasks,
            [1.0] * len(tasks),
            None,
            options.held_out_fraction,
            path=options.tasks,
            seed=seed,
            setting="environment.options.tasks",
        )


def _read(options: ExternalAgentOptions) -> list[Task]:
    tasks = list[Task]()
    for where, row in read_rows(Path(options.tasks), "environment.options.tasks"):
        missing = [name for name in options.fields if name not in row]
        if missing:
            raise ConfigError(f"{where}: the row has no `{missing[0]}`, which environment.options.command names")
        tasks.append(Task(f"row/{len(tasks)}", str(row.get("difficulty", "")), {"row": row}))
    return tasks


def _make(options: Any, outside: Outside) -> Environment:
    return ExternalAgent(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return ExternalTasks(options, seed)


SPEC = EnvironmentSpec(name="external_agent", options_model=ExternalAgentOptions, make=_make, tasks=_tasks)
