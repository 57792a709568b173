"""The mathematics environment in the real sandbox: its session, its limits, its check of answers."""

import asyncio
from collections.abc import Iterator

import pytest

from infra.sandbox.runner import Sandbox
from sao_core.environments.base import StepResult, Task
from sao_core.environments.python_math import PythonMath, PythonMathOptions
from sao_core.outside import Outside
from sao_core.tool_calls import ToolCall, write_tool_calls


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(pool=1)
    yield made
    made.close()


def test_an_episode_computes_breaks_a_limit_goes_on_and_is_judged(sandbox: Sandbox) -> None:
    cells = ["from fractions import Fraction\nx = Fraction(1, 3)", "x + Fraction(1, 6)", "while True: pass", "x"]
    actions = [write_tool_calls([ToolCall("python", {"code": code})]) for code in cells]

    async def episode() -> list[StepResult]:
        environment = PythonMath(PythonMathOptions(call_timeout_s=2.0), Outside(sandbox))
        await environment.reset(Task("row/0", "", {"problem": "What is 1/3 + 1/6?", "answer": "\\frac{1}{2}"}))
        try:
            return [await environment.step(action) for action in (*actions, "\\boxed{0.5}")]
        finally:
            await environment.close()

    *called, answered = asyncio.run(asyncio.wait_for(episode(), 50))
    nothing, value, broken, gone = (result.observation[0].content for result in called)
    assert nothing == "(nothing was printed)"
    assert value == "Fraction(1, 2)"
    assert broken.endswith("the session broke the limit on time and is gone; the next call starts a new one")
    assert gone.endswith("NameError: name 'x' is not defined")
    assert (answered.reward, answered.terminated) == (1.0, True)
