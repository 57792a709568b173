"""The process that holds a verifiers taskset: tells its tasks and scores conversations about them.

Run as a file by a Python that has `verifiers` 0.4, most often in a virtual environment of its own, so it imports that
and the standard library only. It speaks as `side_process` describes; nothing is played here and no model is called,
except by a taskset's own judges.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import pickle
import sys
import threading
from typing import Any


class Refused(Exception):
    """A taskset that cannot be scored on finished conversations; the message says why."""


class Host:
    """Tasksets by their settings, opened once each."""

    def __init__(self) -> None:
        import verifiers.v1 as vf

        self.vf = vf
        self._opened: dict[str, tuple[list[Any], Any]] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        """What is answered at once, or a coroutine of it."""
        taskset = request["taskset"]
        if request["ask"] == "open":
            return self._open(taskset)
        task = self._task(taskset, request["index"])
        if request["ask"] == "task":
            return self._told(task)
        return self._score(task, request["messages"])

    def _open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """How many tasks there are, None without end; refuses what needs more than a conversation."""
        vf, name = self.vf, settings["id"]
        taskset = vf.load_taskset(vf.taskset_config_type(name).model_validate(settings))
        player = vf.environment_class(name)
        if player is not vf.SingleAgentEnv:
            raise Refused(f"it is played by an environment of its own, {player.__name__}")
        kind = vf.task_type(name)
        if kind.NEEDS_CONTAINER:
            raise Refused("its tasks need a container")
        for hook in ("setup", "finalize"):
            if getattr(kind, hook) is not getattr(vf.Task, hook):
                raise Refused(f"its tasks have a `{hook}`, which needs a runtime of verifiers")
        tasks = iter(taskset)
        known = list(tasks) if taskset.bounded else list(itertools.islice(tasks, 1))
        if not known:
            raise Refused("it has no tasks")
        if taskset.toolsets(taskset.config) or kind.toolsets(known[0].config):
            raise Refused("its tasks have tools, which run as servers of verifiers")
        signals = [*known[0].hooks("reward"), *(judge.score for judge in known[0].plugged_judges())]
        for signal in signals:
            runtime = inspect.signature(signal).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                raise Refused(f"its reward `{signal.__name__}` needs a runtime of verifiers")
        if not signals:
            raise Refused("its tasks have no reward")
        self._opened[repr(settings)] = known, tasks
        return {"version": sys.modules["verifiers"].__version__, "size": len(known) if taskset.bounded else None}

    def _task(self, settings: dict[str, Any], index: int) -> Any:
        if repr(settings) not in self._opened:
            self._open(settings)
        known, rest = self._opened[repr(settings)]
        if index >= len(known):
            known.extend(itertools.islice(rest, index + 1 - len(known)))
        return known[index]

    def _told(self, task: Any) -> dict[str, Any]:
        """The opening messages and the plain fields of a task."""
        data = task.data
        if data.prompt is None:
            raise Refused("its task has no prompt: the user would open the conversation")
        opening = [("system", data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            opening.append(("user", data.prompt))
        else:
            opening += [(message.role, _text_of(message)) for message in data.prompt]
        fields = data.model_dump(mode="json", exclude={"prompt", "system_prompt"})
        return {
            "messages": opening,
            "fields": {name: v for name, v in fields.items() if isinstance(v, str | int | float)},
        }

    async def _score(self, task: Any, messages: list[tuple[str, str, bool]]) -> dict[str, Any]:
        """Rewards and metrics of a conversation whose messages are (role, text, whether the policy said it)."""
        from verifiers.v1.state import state_cls

        vf = self.vf
        of_role = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
        nodes = [
            vf.MessageNode(parent=index - 1 if index else None, message=of_role[role](content=text), sampled=sampled)
            for index, (role, text, sampled) in enumerate(messages)
        ]
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
            nodes=nodes,
            calls=[vf.ModelCall(node=i, finish_reason="stop") for i, node in enumerate(nodes) if node.sampled],
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )
        await task.score(trace)
        return {
            "reward": trace.reward,
            "rewards": {name: reward.value for name, reward in trace.rewards.items() if reward is not None},
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        }


def _text_of(message: Any) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or []
    if message.role not in ("system", "user", "assistant") or any(part.type != "text" for part in parts):
        raise Refused("its prompts are not only text")
    return "\n".join(part.text for part in parts)


async def _serve() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a package prints must not come between the replies
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[Any] = asyncio.Queue()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(requests.put_nowait, pickle.load(sys.stdin.buffer))
        finally:
            os._exit(0)  # the owner is gone, and so is everybody who waits

    threading.Thread(target=read, daemon=True).start()
    host: Host | None = None
    running: set[asyncio.Task[None]] = set()

    async def reply(number: int, request: dict[str, Any]) -> None:
        nonlocal host
        answer, error = None, None
        try:
            host = host or Host()
            found = host.answer(request)
            answer = await found if inspect.isawaitable(found) else found
        except Exception as raised:  # the owner raises it, whatever it is
            error = str(raised) if isinstance(raised, Refused) else f"{type(raised).__name__}: {raised}"
        pickle.dump((number, answer, error), replies, protocol=4)
        replies.flush()

    while True:
        task = asyncio.create_task(reply(*await requests.get()))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(_serve())
