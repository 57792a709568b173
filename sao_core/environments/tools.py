"""An environment whose policy calls functions: reading calls, refusing bad ones, counting both, one result each.

Subclasses say what a function does (:meth:`ToolEnvironment.call`) and what a turn without a call is worth
(:meth:`ToolEnvironment.answer`). Nothing here runs code or knows a chat template.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from sao_core.environments.base import Environment, StepResult
from sao_core.tool_calls import MalformedToolCall, ToolCall, parse_tool_calls
from sao_core.trajectory import Message, Role


def function(name: str, description: str, **parameters: Mapping[str, Any] | str) -> dict[str, Any]:
    """The schema of a function whose ``parameters`` are all required: a text by its description, or a JSON schema."""
    properties = {
        key: {"type": "string", "description": value} if isinstance(value, str) else dict(value)
        for key, value in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def shortened(text: str, limit: int) -> str:
    """``text`` with its middle left out where it has more than ``limit`` characters: a result must fit the context."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"


class ToolEnvironment(Environment):
    """Turns of tool calls, ended by a turn without one, by a call that ends the task, or by the turn budget.

    A turn may hold several calls: they run in order and each gets a TOOL message. If one of them cannot be read, none
    of the turn's calls runs; that, an unknown function and wrong arguments cost the turn and are told. ``reward_parts``
    count ``tool_calls`` and ``malformed``.
    """

    tools: ClassVar[tuple[Mapping[str, Any], ...]]
    turns: int = 0
    """Turns that the policy has spoken: subclasses with a :meth:`state` keep it there."""

    def __init__(self, max_turns: int, *, show_tools: bool = True) -> None:
        self._max_turns = max_turns
        self._show_tools = show_tools
        self._functions = {tool["function"]["name"]: tool["function"] for tool in self.tools}

    @property
    def shown_tools(self) -> tuple[Mapping[str, Any], ...]:
        """All of them, or none for a policy that knows them already."""
        return self.tools if self._show_tools else ()

    @abstractmethod
    async def call(self, call: ToolCall) -> str | StepResult:
        """The result to show of a call whose function and arguments are known to be right; a StepResult ends it."""

    @abstractmethod
    async def answer(self, text: str) -> StepResult:
        """What a turn without a tool call is worth; ``text`` is all of it."""

    async def out_of_turns(self) -> StepResult:
        """The end of an episode that used up its turns: without reward, unless a subclass grants one."""
        return StepResult(truncated=True)

    async def step(self, action: str) -> StepResult:
        """Run the calls of a turn, or take it as an answer."""
        self.turns += 1
        ran = malformed = 0
        messages: list[Message] = []
        ended: StepResult | None = None
        try:
            _, calls = parse_tool_calls(action, self.tools)
        except MalformedToolCall as error:
            malformed = 1
            messages.append(Message(Role.TOOL, f"error: {error}"))
        else:
            for index, call in enumerate(calls):
                problem = self._problem(call)
                if problem is None:
                    ran += 1
                    shown = await self.call(call)
                    if isinstance(shown, StepResult):
                        ended = shown
                        break
                else:
                    malformed += 1
                    shown = f"error: {problem}"
                messages.append(Message(Role.TOOL, shown, self._extra(call, index)))
            if not calls:
                ended = await self.answer(action)
        if ended is None:
            ended = StepResult(tuple(messages))
        results = [ended]
        if self.turns >= self._max_turns and not (ended.terminated or ended.truncated):
            results.append(await self.out_of_turns())
            ended = replace(results[1], reward=ended.reward + results[1].reward)
        parts = {"tool_calls": float(ran), "malformed": float(malformed)}
        for result in results:
            for name, value in result.info.get("reward_parts", {}).items():
                parts[name] = parts.get(name, 0.0) + value
        return replace(ended, info={**results[0].info, **ended.info, "reward_parts": parts})

    def _problem(self, call: ToolCall) -> str | None:
        function = self._functions.get(call.name)
        if function is None:
            return f"there is no function `{call.name}`; there are: {', '.join(self._functions)}"
        error = best_match(Draft202012Validator(function.get("parameters", {})).iter_errors(dict(call.arguments)))
        if error is None:
            return None
        where = "".join(f"`{key}`: " for key in error.path)
        return f"arguments of `{call.name}`: {where}{shortened(error.message, 200)}"

    def _extra(self, call: ToolCall, index: int) -> dict[str, str]:
        """Mistral's templates want ids of nine letters and digits; those of others are never shown."""
        given = call.call_id
        own = f"call{self.turns % 1000:03d}{index % 100:02d}"
        return {"name": call.name, "tool_call_id": given if len(given) == 9 and given.isalnum() else own}
