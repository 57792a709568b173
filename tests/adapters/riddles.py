"""A taskset of verifiers as a user would write it: arithmetic with a length penalty and a metric."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class RiddlesConfig(vf.TasksetConfig):
    endless: bool = False
    count: int = 20


class RiddleData(vf.TaskData):
    answer: str
    level: int


class Riddle(vf.Task[RiddleData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.9)
    async def right(self, task: RiddleData, trace: Any) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.1)
    async def short(self, trace: Any) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def turns(self, trace: Any) -> float:
        return trace.num_turns

    @vf.metric
    async def messages(self, trace: Any) -> float:
        if trace.last_reply == "crash":
            raise OSError("the scorer broke")
        return len(trace.messages)


class Riddles(vf.Taskset[Riddle, RiddlesConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self) -> Iterator[Riddle]:
        print("loading, on standard output")
        for n in itertools.count() if self.config.endless else range(self.config.count):
            yield Riddle(
                RiddleData(prompt=f"{n} + {n}", system_prompt="Add.", answer=str(2 * n), level=n % 3), self.config.task
            )


__all__ = ["Riddles"]
