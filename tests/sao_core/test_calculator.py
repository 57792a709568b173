import asyncio
import re
import time
from collections import Counter

import pytest

from sao_core.config import ConfigError
from sao_core.environments import Task, get
from sao_core.environments.arithmetic import MalformedExpression, evaluate
from sao_core.environments.calculator import (
    MISREAD_AS,
    Calculator,
    CalculatorOptions,
    CalculatorTasks,
    demonstrations,
)
from sao_core.trajectory import Message, Role

OPTIONS = CalculatorOptions()
SYMBOLS = {"plus": "+", "minus": "-", "times": "*"}
QUESTION = Task("train/1", "2", {"question": "solve 7 times 3 minus 4", "result": 17})


def play(actions, options=OPTIONS, task=QUESTION):
    async def episode():
        environment = Calculator(options)
        opening = await environment.reset(task)
        results = [await environment.step(action) for action in actions]
        await environment.close()
        return opening, results

    return asyncio.run(episode())


def expression_of(question):
    _, *words = question.split()
    return "".join(SYMBOLS.get(word, word) for word in words)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("7*3-4", 17),
        ("2+3*4", 14),
        ("2-3-4", -5),
        ("(2+3)*4", 20),
        ("-3*-2", 6),
        ("2*(1-(4-9))", 12),
        (" 1 + 1 ", 2),
        ("007", 7),
    ],
)
def test_arithmetic_follows_the_usual_precedence(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "+", "1+", "*3", "1 2", "(1", "1)", "()", "1/2", "2**3", "x", "__import__('os')", "1e9", "9" * 13, "1+1" * 30],
)
def test_anything_else_is_malformed(expression):
    with pytest.raises(MalformedExpression):
        evaluate(expression)


def test_no_expression_takes_long():
    started = time.perf_counter()
    assert evaluate("*".join(["9" * 12] * 4)) == (10**12 - 1) ** 4
    with pytest.raises(MalformedExpression):
        evaluate("(" * 64)
    assert evaluate("-" * 63 + "1") == -1
    assert time.perf_counter() - started < 0.1


def test_a_call_is_answered_and_the_right_answer_earns_one():
    opening, (called, answered) = play(["calc: 7*3-4", "answer: 17"])
    assert opening == (Message(Role.USER, "solve 7 times 3 minus 4"),)
    assert called.observation == (Message(Role.TOOL, "17"),)
    assert (called.reward, called.terminated) == (0.0, False)
    assert (answered.reward, answered.terminated, answered.truncated) == (1.0, True, False)
    assert answered.info["reward_parts"] == {"correct": 1.0, "calls": 1.0, "malformed": 0.0}


def test_a_wrong_answer_ends_with_nothing():
    _, (answered,) = play(["answer: 18"])
    assert (answered.reward, answered.terminated) == (0.0, True)


def test_the_calculator_may_be_called_several_times():
    _, results = play(["calc: 7*3", "calc: 21-4", "answer: 17"])
    assert [r.observation[0].content for r in results[:2]] == ["21", "17"]
    assert results[2].reward == 1.0


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("calc: 7*", "error: number missing"),
        ("calc: 7 3", "error: bad order"),
        ("calc: 7/3", "error: bad symbol"),
        ("calc: (7", "error: bracket open"),
        ("calc:", "error: number missing"),
        ("hello", "error: write calc: or answer:"),
        ("", "error: write calc: or answer:"),
        ("answer: seventeen", "error: write calc: or answer:"),
        ("Answer: 17", "error: write calc: or answer:"),
        ("answer: 17 or 18", "error: write calc: or answer:"),
        ("answer: ١٧", "error: write calc: or answer:"),
        ("calc: ²", "error: bad symbol"),
        ("calc: ٣+1", "error: bad symbol"),
    ],
)
def test_a_malformed_turn_is_told_and_can_be_mended(action, told):
    _, (first, second) = play([action, "answer: 17"])
    assert first.observation == (Message(Role.TOOL, told),)
    assert (first.reward, first.terminated) == (0.0, False)
    assert second.reward == 1.0
    assert second.info["reward_parts"]["malformed"] == 1.0


def test_never_answering_is_truncated_by_the_environment():
    _, results = play(["calc: 1"] * 3, CalculatorOptions(max_turns=3))
    assert [r.truncated for r in results] == [False, False, True]
    assert (results[-1].terminated, results[-1].reward) == (False, 0.0)


def test_an_environment_serves_one_episode():
    async def twice():
        environment = Calculator(OPTIONS)
        await environment.reset(QUESTION)
        await environment.reset(QUESTION)

    with pytest.raises(RuntimeError, match="one episode"):
        asyncio.run(twice())


def test_instructions_come_first_if_asked_for():
    opening, _ = play([], CalculatorOptions(instructions=True))
    assert [message.role for message in opening] == [Role.SYSTEM, Role.USER]
    assert "calc: " in opening[0].content


def test_questions_say_what_their_result_is_and_difficulty_counts_operations():
    tasks = CalculatorTasks(OPTIONS, seed=1)
    for position in range(200):
        task = tasks.task(tasks.key_at(position))
        expression = expression_of(task.data["question"])
        assert evaluate(expression) == task.data["result"]
        assert task.difficulty == str(len(re.findall(r"[-+*]", expression)))


def test_difficulties_come_in_equal_shares():
    tasks = CalculatorTasks(OPTIONS, seed=1)
    for keys in ([tasks.key_at(i) for i in range(64)], tasks.evaluation_keys(64)):
        assert Counter(tasks.task(key).difficulty for key in keys) == {str(n): 16 for n in (1, 2, 3, 4)}


def test_the_same_seed_asks_the_same_and_another_seed_something_else():
    def questions(seed):
        tasks = CalculatorTasks(OPTIONS, seed)
        return [tasks.task(tasks.key_at(i)).data["question"] for i in range(32)]

    assert questions(5) == questions(5)
    assert questions(5) != questions(6)


def test_no_evaluation_question_is_trained_on_or_demonstrated():
    tasks = CalculatorTasks(OPTIONS, seed=0)
    held_out = {expression_of(tasks.task(key).data["question"]) for key in tasks.evaluation_keys(400)}
    trained = {expression_of(tasks.task(tasks.key_at(i)).data["question"]) for i in range(2000)}
    shown = {expression_of(messages[0].content) for messages in demonstrations(OPTIONS, 0, 2000)}
    assert not held_out & (trained | shown)
    assert len(held_out) > 250


def test_a_limited_number_of_training_questions_comes_back_every_epoch():
    tasks = CalculatorTasks(CalculatorOptions(train_tasks=8), seed=0)
    epochs = [[tasks.key_at(position) for position in range(start, start + 8)] for start in (0, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"train/{i}" for i in range(8)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("key", ["row/1", "train/", "train/x", "train/-1", "evaluation", ""])
def test_a_key_of_another_source_is_refused(key):
    with pytest.raises(KeyError):
        CalculatorTasks(OPTIONS, seed=0).task(key)


def shown_calls(count=3000):
    """(difficulty, true operators, operators of the demonstrated call) of each demonstration."""
    for question, call, result, answer in demonstrations(OPTIONS, 0, count):
        true, shown = expression_of(question.content), call.content.removeprefix("calc: ")
        assert re.findall(r"\d+", true) == re.findall(r"\d+", shown)
        assert answer.content == f"answer: {result.content}" == f"answer: {evaluate(shown)}"
        operators = re.findall(r"[-+*]", true)
        yield len(operators), operators, re.findall(r"[-+*]", shown)


def test_the_demonstrator_misreads_the_last_operator_more_often_in_harder_questions():
    seen, misread = Counter(), Counter()
    for level, true, shown in shown_calls():
        seen[level] += 1
        misread[level] += true[-1] != shown[-1]
    for level, rate in zip((1, 2, 3, 4), OPTIONS.misread, strict=True):
        assert misread[level] / seen[level] == pytest.approx(rate, abs=0.06)


def test_its_mistakes_are_systematic():
    for _, true, shown in shown_calls(1000):
        assert all(b in (a, MISREAD_AS[a]) for a, b in zip(true, shown, strict=True))
        assert sum(a != b for a, b in zip(true[:-1], shown[:-1], strict=True)) <= 1


def test_demonstrations_end_in_answers_that_the_environment_accepts():
    for question, call, _, answer in list(demonstrations(OPTIONS, 0, 40)):
        task = Task("train/0", "1", {"question": question.content, "result": evaluate(expression_of(question.content))})
        _, (called, answered) = play([call.content, answer.content], task=task)
        assert called.observation[0].content == answer.content.removeprefix("answer: ")
        assert answered.terminated


def test_a_slow_calculator_takes_its_time_without_blocking_others():
    options = CalculatorOptions(tool_latency_mean_s=0.2, tool_latency_sigma=0.0)

    async def side_by_side():
        environments = [Calculator(options) for _ in range(20)]
        for environment in environments:
            await environment.reset(QUESTION)
        started = time.perf_counter()
        await asyncio.gather(*(environment.step("calc: 1+1") for environment in environments))
        return time.perf_counter() - started

    assert 0.19 < asyncio.run(side_by_side()) < 1.0


def test_tool_latency_has_the_mean_that_is_asked_for(monkeypatch):
    waits = []

    async def remember(seconds):
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", remember)
    options = CalculatorOptions(tool_latency_mean_s=0.3, tool_latency_sigma=1.0)
    asyncio.run(_one_call_each(options, 3000))
    assert sum(waits) / len(waits) == pytest.approx(0.3, rel=0.1)
    assert max(waits) > 2.0


async def _one_call_each(options, count):
    for number in range(count):
        environment = Calculator(options)
        await environment.reset(Task(f"train/{number}", "1", {"question": "find 1 plus 1", "result": 2}))
        await environment.step("calc: 1+1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"misread": [0.1, 0.2]}, "misread needs a rate for each of 1 … 4 operations: got (0.1, 0.2)"),
        ({"careless": [0.1, 0.2, 0.3, 1.4]}, "careless must hold probabilities"),
        ({"max_operations": 5}, "max_operations must be less than or equal to 4: got 5"),
        ({"max_operand": 4}, "max_operand must be at least 5, since the operands of a question differ: got 4"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError) as caught:
        get("calculator").parse_options(options)
    assert message in str(caught.value)
