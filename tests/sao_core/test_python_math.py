"""Problems with a Python session: the session, the answer, the rows of a file, made problems and demonstrations."""

import asyncio
import contextlib
import io
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from local_code import LocalCode
from rollout_fixtures import TOKENIZER

from sao_core.config import ConfigError
from sao_core.environments import extras, math_answers
from sao_core.environments.base import StepResult, Task, get
from sao_core.environments.math_answers import boxed, is_right
from sao_core.environments.math_problems import LEVELS
from sao_core.environments.python_math import SPEC, MadeProblems, PythonMath, PythonMathOptions
from sao_core.outside import Limits, NotLent, Outside, Ran, StoppedBy
from sao_core.rollout.renderer import Renderer
from sao_core.tool_calls import ToolCall, parse_tool_calls, write_tool_calls
from sao_core.trajectory import Message, Role

T = TypeVar("T")
TASK = Task("row/0", "", {"problem": "What is 6 * 7?", "answer": "42"})


def play(actions: list[str], code: Any = None, task: Task = TASK, **options: Any) -> list[StepResult]:
    """The results of the given turns, and the environment closed after them."""

    async def episode() -> list[StepResult]:
        environment = PythonMath(PythonMathOptions(**options), Outside(code or LocalCode()))
        try:
            await environment.reset(task)
            return [await environment.step(action) for action in actions]
        finally:
            await environment.close()

    return within(episode())


def within(answer: Awaitable[T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(answer, 50)

    return asyncio.run(limited())


def run(code: str) -> str:
    return write_tool_calls([ToolCall("python", {"code": code})])


def shown(result: StepResult) -> str:
    return result.observation[0].content


def test_the_session_keeps_its_variables_over_turns_and_exceptions() -> None:
    code = LocalCode()
    first, second, third = play([run("x = 6"), run("y = x * 7\n1 / 0"), run("print('y is')\ny")], code)
    assert shown(first) == "(nothing was printed)"
    assert shown(second).endswith("ZeroDivisionError: division by zero")
    assert shown(third) == "y is\n42"
    assert [message.role for message in third.observation] == [Role.TOOL]
    assert third.observation[0].extra["name"] == "python"
    assert len(code.sessions) == 1
    assert code.sessions[0].closed == 1


def test_the_boxed_answer_earns_the_reward() -> None:
    called, right = play([run("6 * 7"), "It is \\boxed{42}."])
    assert (called.reward, called.terminated) == (0.0, False)
    assert called.info["reward_parts"] == {"tool_calls": 1.0, "malformed": 0.0}
    assert (right.reward, right.terminated) == (1.0, True)
    assert right.info["reward_parts"] == {"tool_calls": 0.0, "malformed": 0.0, "correct": 1.0}


@pytest.mark.parametrize(
    ("text", "malformed"),
    [("\\boxed{41}", 0.0), ("42", 1.0), ("<think>\\boxed{42}</think> so 42", 1.0), ("\\boxed{42", 1.0)],
)
def test_another_answer_or_none_ends_without_reward(text: str, malformed: float) -> None:
    (result,) = play([text])
    assert (result.reward, result.terminated) == (0.0, True)
    assert result.info["reward_parts"] == {"tool_calls": 0.0, "malformed": malformed, "correct": 0.0}


def test_a_call_with_a_boxed_answer_beside_it_is_a_call() -> None:
    (result,) = play([f"\\boxed{{42}} {run('1')}"])
    assert not result.terminated


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("<tool_call>print(1)</tool_call>", "error: the tool call is not valid JSON"),
        (write_tool_calls([ToolCall("bash", {"code": "ls"})]), "error: there is no function `bash`; there are: python"),
        (write_tool_calls([ToolCall("python", {})]), "error: arguments of `python`: 'code' is a required property"),
        (write_tool_calls([ToolCall("python", {"code": 3})]), "error: arguments of `python`: `code`: 3 is not of type"),
    ],
    ids=["json", "function", "missing", "type"],
)
def test_a_malformed_call_costs_a_turn_and_is_told(action: str, message: str) -> None:
    first, _, last = play([action, run("1"), run("2")], max_turns=3)
    assert shown(first).startswith(message)
    assert first.info["reward_parts"] == {"tool_calls": 0.0, "malformed": 1.0}
    assert (last.truncated, last.terminated, last.reward) == (True, False, 0.0)


def test_a_session_that_breaks_a_limit_is_told_and_the_next_call_has_a_fresh_one() -> None:
    code = LocalCode()
    results = play([run("x = 1"), run("while True: pass"), run("'x' in globals()")], code, call_timeout_s=1.0)
    assert shown(results[1]) == "error: the session broke the limit on time and is gone; the next call starts a new one"
    assert shown(results[2]) == "False"
    assert len(code.sessions) == 2
    assert all(session.closed for session in code.sessions)


def test_a_long_output_loses_its_middle() -> None:
    (result,) = play([run("print('a' * 500 + 'b' * 500)")], output_characters=100)
    assert shown(result) == "a" * 50 + "\n[900 characters left out]\n" + "b" * 50


class Broken(LocalCode):
    async def open(self, limits: Limits | None = None) -> Any:
        class Session:
            async def run(self, code: str, wall_s: float | None = None) -> Ran:
                return Ran(None, "", "no space left", 0.0, StoppedBy.SANDBOX)

            async def close(self) -> None: ...

        return Session()


def test_a_sandbox_that_breaks_is_no_answer_of_the_policy() -> None:
    with pytest.raises(RuntimeError, match="the sandbox broke: no space left"):
        play([run("1")], Broken())


def test_an_episode_goes_on_in_another_process_with_the_variables_it_had() -> None:
    async def two() -> tuple[str, int]:
        before = PythonMath(PythonMathOptions(), Outside(LocalCode()))
        await before.reset(TASK)
        for code in ("x = 40", "def f(n): return n + 2"):
            await before.step(run(code))
        state = json.loads(json.dumps(before.state()))
        await before.close()
        after = PythonMath(PythonMathOptions(), Outside(LocalCode()))
        await after.restore(TASK, state)
        result = await after.step(run("f(x)"))
        await after.close()
        return shown(result), after.turns

    assert within(two()) == ("42", 3)


def test_a_session_that_cannot_be_made_again_is_refused() -> None:
    async def two() -> None:
        before = PythonMath(PythonMathOptions(), Outside(LocalCode()))
        await before.reset(TASK)
        await before.step(run("import random; random.random()"))
        state = before.state()
        await before.close()
        after = PythonMath(PythonMathOptions(), Outside(LocalCode()))
        try:
            await after.restore(TASK, state)
        finally:
            await after.close()

    with pytest.raises(RuntimeError, match="call 1 of the session gave another result"):
        within(two())


BOXES = {
    "so \\boxed{42}": "42",
    "\\boxed{1} then \\boxed{2}": "2",
    "\\boxed{\\frac{1}{2}} end": "\\frac{1}{2}",
    "\\boxed {x} and \\boxed{y": "x",
    "\\boxed{\\{1, 2\\}}": "\\{1, 2\\}",
    "\\boxed{\\left\\{ 1 \\right.}": "\\left\\{ 1 \\right.",
    "\\boxed{}": "",
    "42": None,
}


@pytest.mark.parametrize(("text", "answer"), BOXES.items(), ids=BOXES)
def test_the_last_box_is_found_with_its_braces(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


def test_a_policy_that_repeats_itself_keeps_nobody_waiting() -> None:
    text = "\\boxed{" * 10_000
    started = time.process_time()
    assert boxed(text) is None
    assert boxed(text + "7}") == "7"
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("given", "known", "right"),
    [
        ("073", "73", True),
        ("$1,234$", "1234", True),
        ("12{,}345", "12345", True),
        ("+5", "5", True),
        ("-5", "5", False),
        ("x + 1", "x + 1", True),
        ("", "5", False),
        ("9" * 1001, "5", False),
    ],
)
def test_whole_numbers_and_equal_texts_need_no_other_program(given: str, known: str, right: bool) -> None:
    code = LocalCode()
    assert asyncio.run(is_right(given, known, code)) is right
    assert code.runs == []


@pytest.mark.parametrize(
    ("given", "known", "right"),
    [
        ("0.5", "\\frac{1}{2}", True),
        pytest.param("\\frac{84}{2}", "42", True, marks=pytest.mark.long),
        pytest.param("1 + x^2", "x^2+1", True, marks=pytest.mark.long),
        pytest.param("\\{2, 1\\}", "\\{1,2\\}", True, marks=pytest.mark.long),
        pytest.param("x^2", "x^3", False, marks=pytest.mark.long),
        pytest.param("no number", "42", False, marks=pytest.mark.long),
    ],
)
def test_other_answers_are_compared_by_math_verify(given: str, known: str, right: bool) -> None:
    code = LocalCode()
    assert asyncio.run(is_right(given, known, code)) is right
    assert len(code.runs) == 1


def test_an_answer_that_cannot_be_compared_in_time_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "CHECK_LIMITS", Limits(wall_s=0.5))
    monkeypatch.setattr(math_answers, "_PROGRAM", "while True: pass")

    async def check() -> tuple[bool, int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        other = asyncio.create_task(tick())
        right = await is_right("9^{9^{9^9}}", "42", LocalCode())
        other.cancel()
        return right, ticks

    right, ticks = within(check())
    assert not right
    assert ticks > 5  # the other rollouts of the worker went on


def test_a_check_that_breaks_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "_PROGRAM", "import nothing_like_this")
    with pytest.raises(RuntimeError, match="checking an answer with math-verify broke: ModuleNotFoundError"):
        within(is_right("x", "y", LocalCode()))


def written(folder: Path, *rows: Any, name: str = "set.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


ROWS = [
    {"problem": "What is 1+1?", "answer": 2, "id": "I-1", "difficulty": "easy"},
    {"question": "What is 2+2?", "answer": "2 + 2 = 4\n#### 4"},
    {"ID": "2024-I-2", "Problem": "What is 3+3?", "Answer": 6.0, "Solution": "Add."},
    {"problem": "Half of 1?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
]


def test_rows_are_read_in_the_shapes_in_which_sets_are_published(tmp_path: Path) -> None:
    source = SPEC.tasks(PythonMathOptions(path=written(tmp_path, *ROWS)), 0)
    tasks = [source.task(f"row/{index}") for index in range(4)]
    assert [task.data["answer"] for task in tasks] == ["2", "4", "6", "\\frac{1}{2}"]
    assert [task.difficulty for task in tasks] == ["easy", "", "", "Level 1"]
    assert [task.data.get("id") for task in tasks] == ["I-1", None, "2024-I-2", None]
    (held,) = source.evaluation_keys(9)
    assert sorted([held, *(source.key_at(position) for position in range(3))]) == [f"row/{n}" for n in range(4)]


def test_a_file_of_its_own_is_evaluated(tmp_path: Path) -> None:
    path, other = written(tmp_path, ROWS[0]), written(tmp_path, *ROWS[1:], name="held.jsonl")
    source = SPEC.tasks(PythonMathOptions(path=path, evaluation_path=other), 0)
    assert source.evaluation_keys(9) == ["held/0", "held/1", "held/2"]
    assert source.key_at(5) == "row/0"
    assert source.task("held/0").data["problem"] == "What is 2+2?"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": 1}, "field `problem` (or `question`) is missing; there are: answer"),
        ({"problem": "", "answer": 1}, "field `problem` must be a text: got ''"),
        ({"question": 3, "answer": 1}, "field `question` must be a text: got 3"),
        ({"problem": "x"}, "field `answer` is missing, and no field `solution` boxes one"),
        ({"problem": "x", "answer": None, "solution": "5"}, "field `answer` is missing"),
        ({"problem": "x", "answer": [1]}, "field `answer` must be a text or a number: got [1]"),
        ({"problem": "x", "answer": True}, "field `answer` must be a text or a number: got True"),
        ({"problem": "x", "answer": " "}, "field `answer` is empty"),
        ({"problem": "x", "answer": 1, "difficulty": [1]}, "field `difficulty` must be a text or a number: got [1]"),
        ({"problem": "x", "answer": 1, "weight": -1}, "`weight` must be a number over 0: got -1"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SPEC.tasks(PythonMathOptions(path=written(tmp_path, ROWS[0], row)), 0)
    assert f"set.jsonl:2: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"easiest": 4, "hardest": 2}, "hardest must be at least easiest (4): got 2"),
        ({"evaluation_path": "x.jsonl"}, "evaluation_path needs a path to train on: got 'x.jsonl' alone"),
        ({"max_turns": 0}, "max_turns"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SPEC.parse_options(options)
    assert message in str(error.value)


def test_what_the_machine_lacks_is_said_before_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotLent, match="no sandbox"):
        SPEC.make(PythonMathOptions(), Outside())
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    for make in (
        lambda: SPEC.make(PythonMathOptions(), Outside(LocalCode())),
        lambda: SPEC.tasks(PythonMathOptions(), 0),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'sao-pipeline\[math\]'"):
            make()


def test_several_hundred_made_problems_are_distinct_and_their_programs_find_their_answers() -> None:
    source = MadeProblems(PythonMathOptions(), seed=0)
    made = [source.problem(f"train/{index}") for index in range(600)]
    assert len({problem.question for _, problem in made}) >= 500
    assert {level for level, _ in made} == set(range(2, LEVELS + 1))
    easy = MadeProblems(PythonMathOptions(easiest=1, hardest=1), seed=0)
    for _, problem in [*made[:60], *(easy.problem(f"train/{index}") for index in range(60))]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(problem.program, {})
        assert printed.getvalue().strip() == str(problem.answer), problem


def test_made_problems_come_from_the_seed_and_none_is_in_both_splits() -> None:
    options = PythonMathOptions(easiest=2, hardest=3, train_tasks=50)
    one, again, other = (MadeProblems(options, seed) for seed in (1, 1, 2))
    keys = [one.key_at(position) for position in range(50)]
    assert sorted(keys) == sorted(f"train/{index}" for index in range(50))
    assert [one.task(key) for key in keys] == [again.task(key) for key in keys]
    assert one.task("train/0") != other.task("train/0")
    assert {one.task(key).difficulty for key in keys} == {"2", "3"}
    asked = {one.task(key).data["problem"] for key in (f"train/{index}" for index in range(300))}
    assert not asked & {one.task(key).data["problem"] for key in one.evaluation_keys(100)}
    with pytest.raises(KeyError):
        one.task("row/1")


def test_demonstrations_are_what_an_episode_looks_like() -> None:
    options = PythonMathOptions(guess=0.5)
    assert SPEC.demonstrations is not None
    told = list(SPEC.demonstrations(options, 0, 40))
    computed = [conversation for conversation in told if len(conversation) == 5]
    assert 10 < len(computed) < 30
    source = MadeProblems(options, 0)
    for index, conversation in enumerate(told):
        known = source.task(f"demonstration/{index}").data["answer"]
        assert (boxed(conversation[-1].content) == known) == (conversation in computed)
    renderer = Renderer(TOKENIZER)
    ids, mask = renderer.conversation(computed[0])
    acted = renderer.action_text([token for token, on in zip(ids, mask, strict=True) if on]).split("<|end|>")
    _, (call,) = parse_tool_calls(acted[0])
    (result,) = play([acted[0]])
    assert call.name == "python"
    assert shown(result) == computed[0][3].content
    assert result.observation[0].extra.keys() == computed[0][3].extra.keys()


def test_instructions_and_tools_are_left_out_together() -> None:
    async def opening(**options: Any) -> tuple[tuple[Message, ...], int]:
        environment = PythonMath(PythonMathOptions(**options), Outside(LocalCode()))
        return await environment.reset(TASK), len(environment.shown_tools)

    (system, question), tools = within(opening())
    assert (system.role, question.content, tools) == (Role.SYSTEM, "What is 6 * 7?", 1)
    assert within(opening(instructions=False)) == ((question,), 0)
    assert SPEC.demonstrations is not None
    (first, *_), *_ = SPEC.demonstrations(PythonMathOptions(instructions=False), 0, 1)
    assert (first.role, first.extra) == (Role.USER, {})
    (first, *_), *_ = SPEC.demonstrations(PythonMathOptions(), 0, 1)
    assert first.extra["tools"][0]["function"]["name"] == "python"


def test_it_is_built_in() -> None:
    assert get("python_math") is SPEC
