"""One prompt, one reply, one verdict: what environments of a single turn share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from sao_core.environments.base import Environment, StepResult, Task
from sao_core.trajectory import Message


class SingleTurn(Environment):
    """Subclasses give :meth:`judge`; the conversation opens with the task's ``messages`` unless they say otherwise."""

    _task: Task | None = None

    def opening(self, task: Task) -> tuple[Message, ...]:
        """What the policy reads."""
        messages: tuple[Message, ...] = task.data["messages"]
        return messages

    @abstractmethod
    async def judge(self, task: Task, reply: str) -> StepResult:
        """The result that ends the episode."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Open the conversation."""
        self._task = task
        return self.opening(task)

    def state(self) -> dict[str, Any]:
        """Nothing: all is in the task."""
        return {}

    async def restore(self, task: Task, state: dict[str, Any]) -> None:
        """Go on with the task; its one turn is not over."""
        self._task = task

    async def step(self, action: str) -> StepResult:
        """Judge the reply."""
        if self._task is None:
            raise RuntimeError("reset comes before step")
        return await self.judge(self._task, action)
