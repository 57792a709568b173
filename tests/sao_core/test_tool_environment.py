"""Environments whose policy calls functions: order, endings, refusals, counts."""

import asyncio
from typing import Any, ClassVar

import pytest

from sao_core.environments.base import StepResult, Task
from sao_core.environments.tools import ToolEnvironment, function, shortened
from sao_core.tool_calls import ToolCall, write_tool_calls
from sao_core.trajectory import Message, Role


class Counter(ToolEnvironment):
    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    tools: ClassVar = (
        function("add", "Adds a number.", number={"type": "integer", "minimum": 0}),
        function("submit", "Ends the task."),
    )

    def __init__(self, max_turns: int = 5, **more: Any) -> None:
        super().__init__(max_turns, **more)
        self.total = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return (Message(Role.USER, "count"),)

    async def call(self, call: ToolCall) -> str | StepResult:
        if call.name == "submit":
            return StepResult(reward=1.0, terminated=True, info={"reward_parts": {"total": float(self.total)}})
        self.total += call.arguments["number"]
        return str(self.total)

    async def answer(self, text: str) -> StepResult:
        return StepResult((Message(Role.USER, f"you said {text}"),), 0.25, info={"reward_parts": {"malformed": 1.0}})


class Lenient(Counter):
    async def out_of_turns(self) -> StepResult:
        return StepResult(reward=0.5, truncated=True)


def step(environment: ToolEnvironment, *calls: ToolCall, text: str = "") -> StepResult:
    return asyncio.run(environment.step(write_tool_calls(calls, text) if calls else text))


def add(number: Any, call_id: str = "") -> ToolCall:
    return ToolCall("add", {"number": number}, call_id)


def test_several_calls_run_in_order_and_each_has_its_result() -> None:
    result = step(Counter(), add(1), add(2), text="first")
    assert [(m.role, m.content) for m in result.observation] == [(Role.TOOL, "1"), (Role.TOOL, "3")]
    assert [m.extra["name"] for m in result.observation] == ["add", "add"]
    ids = [m.extra["tool_call_id"] for m in result.observation]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert result.info["reward_parts"] == {"tool_calls": 2.0, "malformed": 0.0}


def test_the_id_that_the_model_gave_is_the_results() -> None:
    written = '[TOOL_CALLS] [{"name": "add", "arguments": {"number": 1}, "id": "abcde1234"}]'
    (message,) = asyncio.run(Counter().step(written)).observation
    assert message.extra == {"name": "add", "tool_call_id": "abcde1234"}


def test_a_call_that_ends_the_task_is_the_last_one_that_runs() -> None:
    environment = Counter()
    result = step(environment, add(1), ToolCall("submit", {}), add(5))
    assert (result.terminated, result.reward, environment.total) == (True, 1.0, 1)
    assert result.info["reward_parts"] == {"tool_calls": 2.0, "malformed": 0.0, "total": 1.0}


def test_wrong_calls_are_told_beside_the_right_ones() -> None:
    environment = Counter()
    result = step(environment, add(1), ToolCall("sub", {}), add(-1), add(2))
    first, unknown, wrong, last = (m.content for m in result.observation)
    assert (first, last) == ("1", "3")
    assert unknown == "error: there is no function `sub`; there are: add, submit"
    assert wrong == "error: arguments of `add`: `number`: -1 is less than the minimum of 0"
    assert result.info["reward_parts"] == {"tool_calls": 2.0, "malformed": 2.0}


def test_none_of_a_turns_calls_runs_if_one_cannot_be_read() -> None:
    environment = Counter()
    text = write_tool_calls([add(1)]) + "<tool_call>{</tool_call>"
    result = asyncio.run(environment.step(text))
    assert environment.total == 0
    assert result.observation[0].content.startswith("error: the tool call is not valid JSON")
    assert result.info["reward_parts"] == {"tool_calls": 0.0, "malformed": 1.0}


def test_a_turn_without_calls_is_an_answer_with_all_of_its_text() -> None:
    result = step(Counter(), text="<think>so</think> 3 ")
    assert result.observation[0].content == "you said <think>so</think> 3 "
    assert result.reward == 0.25
    assert result.info["reward_parts"] == {"tool_calls": 0.0, "malformed": 1.0}


@pytest.mark.parametrize(("kind", "reward"), [(Counter, 0.0), (Lenient, 0.5)])
def test_the_turn_budget_ends_the_episode(kind: type[Counter], reward: float) -> None:
    environment = kind(max_turns=2)
    assert not step(environment, add(1)).truncated
    result = step(environment, add(2))
    assert (result.truncated, result.terminated, result.reward, result.observation) == (True, False, reward, ())
    assert result.info["reward_parts"] == {"tool_calls": 1.0, "malformed": 0.0}


def test_what_the_last_turn_earned_is_kept_when_the_budget_ends() -> None:
    result = step(Lenient(max_turns=1), text="3")
    assert (result.reward, result.truncated) == (0.75, True)
    assert result.info["reward_parts"] == {"tool_calls": 0.0, "malformed": 1.0}


def test_the_last_turn_of_the_budget_may_end_the_task() -> None:
    assert step(Counter(max_turns=1), ToolCall("submit", {})).reward == 1.0


def test_tools_are_shown_unless_the_policy_knows_them() -> None:
    assert [tool["function"]["name"] for tool in Counter().shown_tools] == ["add", "submit"]
    assert Counter(show_tools=False).shown_tools == ()
    assert step(Counter(show_tools=False), add(1)).observation[0].content == "1"


def test_a_long_result_loses_its_middle() -> None:
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcde\n[1 characters left out]\nghijk"
