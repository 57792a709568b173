"""Tasksets of `verifiers` 0.4: the policy answers a task's prompt, the taskset's own rewards score what it said.

A process holds the taskset (`verifiers_host`), so the package may live in a Python of its own, with its own pins.
Conversations only: tools, containers and environments that verifiers plays itself are refused before a run starts.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from sao_core.config import ConfigError, Section
from sao_core.environments.base import Environment, EnvironmentSpec, StepResult, Task, TaskSource
from sao_core.environments.row_tasks import hold_out
from sao_core.environments.side_process import SideProcess, SideProcessFailed
from sao_core.environments.single_turn import SingleTurn
from sao_core.environments.walk import Walk
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

_EVERY = 8
"""Of a taskset without end, one task in this many is held out."""
_HOST = Path(__file__).with_name("verifiers_host.py")


class VerifiersOptions(Section):
    """Settings of the `verifiers` environment."""

    taskset: str = Field(description="Id of an installed taskset: the module that exports it, e.g. `my_taskset`.")
    config: dict[str, Any] = Field(default_factory=dict, description="The taskset's own settings.")
    python: str | None = Field(
        None,
        description="The Python that has verifiers and the taskset, e.g. `venv-verifiers/bin/python`, where their pins "
        "do not go with yours (openai below 3, for one). Empty takes the Python of this process.",
    )
    held_out_fraction: float = Field(
        0.1, gt=0, lt=1, description="Share of a finite taskset that is only evaluated, at least one task."
    )
    difficulty: str | None = Field(None, description="Field of the tasks' data to report rewards by.")
    reward_range: tuple[float, float] = Field(
        (0.0, 1.0), description="Smallest and largest weighted sum of the taskset's rewards."
    )


class _Taskset:
    """A taskset in the other process."""

    def __init__(self, options: VerifiersOptions) -> None:
        python = options.python or sys.executable
        found = shutil.which(os.path.expanduser(python))
        if found is None:
            raise ConfigError(f"environment.options.python is not a program: got `{python}`")
        self._settings = {**options.config, "id": options.taskset}
        self._process = _processes.setdefault(found, SideProcess([found, "-P", str(_HOST)]))
        try:
            opened = self._process.ask({"ask": "open", "taskset": self._settings}).result()
        except SideProcessFailed as error:
            raise ConfigError(_why(str(error), options, python)) from None
        self.version: str = opened["version"]
        self.size: int | None = opened["size"]

    def task(self, index: int) -> Mapping[str, Any]:
        """Messages and fields of a task."""
        told: Mapping[str, Any] = self._ask("task", index).result()
        return told

    async def score(self, index: int, messages: list[tuple[str, str, bool]]) -> Mapping[str, Any]:
        """Rewards and metrics of a conversation."""
        scored: Mapping[str, Any] = await asyncio.wrap_future(self._ask("score", index, messages=messages))
        return scored

    def _ask(self, what: str, index: int, **more: Any) -> Any:
        return self._process.ask({"ask": what, "taskset": self._settings, "index": index, **more})


def _why(error: str, options: VerifiersOptions, python: str) -> str:
    error = " ".join(error.split())
    if "No module named 'verifiers'" in error:
        return (
            "environment.name `verifiers` needs a package that is not installed: pip install "
            f"'sao-pipeline[verifiers]', or set environment.options.python to a Python that has it: got `{python}`"
        )
    return f"environment.options.taskset `{options.taskset}` cannot be used: {error}"


_tasksets: dict[str, _Taskset] = {}
_processes: dict[str, SideProcess] = {}
"""By the Python that they run: importing verifiers takes seconds."""


def _taskset(options: VerifiersOptions) -> _Taskset:
    key = json.dumps([options.taskset, options.python, options.config], sort_keys=True, default=str)
    if key not in _tasksets:
        _tasksets[key] = _Taskset(options)
    return _tasksets[key]


class Verifiers(SingleTurn):
    """One task, one turn. The reward is the weighted sum that verifiers would give the conversation."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: VerifiersOptions) -> None:
        self._taskset = _taskset(options)
        self.version = f"1+{self._taskset.version}"  # type: ignore[misc]
        self.reward_range = options.reward_range  # type: ignore[misc]

    async def judge(self, task: Task, reply: str) -> StepResult:
        """Have the reply scored. Raises RuntimeError if the taskset cannot."""
        said = [(str(message.role), message.content, False) for message in task.data["messages"]]
        try:
            scored = await self._taskset.score(task.data["index"], [*said, ("assistant", reply, True)])
        except SideProcessFailed as error:
            raise RuntimeError(f"the taskset could not score: {error}") from error
        parts = {**scored["metrics"], **scored["rewards"]}
        finite = {name: float(value) for name, value in parts.items() if math.isfinite(value)}
        return StepResult(reward=float(scored["reward"]), terminated=True, info={"reward_parts": finite})


class VerifiersTasks(TaskSource):
    """Tasks by their position in the taskset: ``task/N``."""

    def __init__(self, options: VerifiersOptions, seed: int) -> None:
        self._options = options
        self._taskset = _taskset(options)
        size = self._taskset.size
        self._walk: Walk | None = None
        self._held_out: list[int] = []
        if size is not None:
            if size < 2:
                raise ConfigError(
                    f"environment.options.taskset `{options.taskset}` needs at least two tasks, one to train on and "
                    f"one held out: got {size}"
                )
            self._held_out, self._training = hold_out(size, options.held_out_fraction, seed)
            self._walk = Walk([1.0] * len(self._training), "verifiers", seed)
        self.epoch_size = None if self._walk is None else len(self._walk)
        """Training tasks of an epoch; None of a taskset without end."""

    def key_at(self, position: int) -> str:
        """Every training task once per epoch; of a taskset without end, the next one that is not held out."""
        if self._walk is None:
            return f"task/{position + position // (_EVERY - 1)}"
        return f"task/{self._training[self._walk[position]]}"

    def evaluation_keys(self, count: int) -> list[str]:
        """Held-out tasks."""
        if self._walk is None:
            return [f"task/{index * _EVERY + _EVERY - 1}" for index in range(count)]
        return [f"task/{index}" for index in self._held_out[:count]]

    def task(self, key: str) -> Task:
        """The task of a key; raises KeyError if there is none."""
        kind, _, index = key.partition("/")
        size = self._taskset.size
        if kind != "task" or not index.isdecimal() or (size is not None and int(index) >= size):
            raise KeyError(key)
        told = self._taskset.task(int(index))
        messages = tuple(Message(Role(role), text) for role, text in told["messages"])
        return Task(key, self._difficulty(told["fields"]), {"messages": messages, "index": int(index)})

    def _difficulty(self, fields: Mapping[str, Any]) -> str:
        name = self._options.difficulty
        if name is None:
            return ""
        if name not in fields:
            raise ConfigError(
                f"environment.options.difficulty names no plain field of the tasks: got `{name}`; there are: "
                f"{', '.join(fields)}"
            )
        return str(fields[name])


def _make(options: Any, outside: Outside) -> Environment:
    return Verifiers(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return VerifiersTasks(options, seed)


SPEC = EnvironmentSpec(name="verifiers", options_model=VerifiersOptions, make=_make, tasks=_tasks)
