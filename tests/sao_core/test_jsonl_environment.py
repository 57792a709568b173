import asyncio
import json

import pytest

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

SPEC = get("jsonl")


def longer_is_better(text, row):
    return min(1.0, len(text) / row["wanted_length"])


def out_of_range(text, row):
    return 1.5


def source(tmp_path, rows, seed=0, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    parsed = SPEC.parse_options({"path": str(path), **options})
    return parsed, SPEC.tasks(parsed, seed)


def refusal(tmp_path, rows, **options):
    with pytest.raises(ConfigError) as caught:
        source(tmp_path, rows, **options)
    return str(caught.value)


def judge(options, task, reply):
    async def episode():
        environment = SPEC.make(options, Outside())
        opening = await environment.reset(task)
        result = await environment.step(reply)
        await environment.close()
        return opening, result

    return asyncio.run(episode())


NUMBERS = [{"prompt": f"double {n}", "answer": 2 * n} for n in range(20)]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("8", 1.0),
        (" 8.\n", 1.0),
        ("answer: 8", 1.0),
        ("Twice four.\nANSWER = 8", 1.0),
        ("answer: 9 … no, answer: 8", 1.0),
        ("9", 0.0),
        ("it is 8", 0.0),
        ("answer: 8 or 9", 0.0),
        ("answer:", 0.0),
        ("", 0.0),
    ],
)
def test_the_reply_is_compared_with_the_answer(tmp_path, reply, reward):
    options, tasks = source(tmp_path, NUMBERS)
    opening, result = judge(options, tasks.task("row/4"), reply)
    assert opening == (Message(Role.USER, "double 4"),)
    assert (result.reward, result.terminated, result.observation) == (reward, True, ())


def test_a_reply_that_another_worker_finishes_is_judged_by_the_same_row(tmp_path):
    options, tasks = source(tmp_path, NUMBERS)

    async def episode():
        begun, restored = SPEC.make(options, Outside()), SPEC.make(options, Outside())
        await begun.reset(tasks.task("row/4"))
        await restored.restore(tasks.task("row/4"), begun.state())
        return [(await restored.step(reply)).reward for reply in ("8", "9")]

    assert asyncio.run(episode()) == [1.0, 0.0]


def test_the_pattern_that_finds_the_answer_is_yours(tmp_path):
    options, tasks = source(tmp_path, NUMBERS, extract=r"(?s).*\\boxed\{(.*?)\}")
    assert judge(options, tasks.task("row/4"), r"so \boxed{8} it is")[1].reward == 1.0
    assert judge(options, tasks.task("row/4"), "8")[1].reward == 0.0


def test_a_function_of_yours_may_judge(tmp_path):
    rows = [{"prompt": "write", "answer": "", "wanted_length": 8}] * 2
    options, tasks = source(tmp_path, rows, reward=f"{__name__}:longer_is_better")
    assert judge(options, tasks.task("row/0"), "four")[1].reward == 0.5


def test_a_reward_out_of_range_is_refused(tmp_path):
    options, tasks = source(tmp_path, NUMBERS, reward=f"{__name__}:out_of_range")
    with pytest.raises(ValueError, match=r"out_of_range must return a reward from 0 to 1: got 1.5"):
        judge(options, tasks.task("row/0"), "x")


def test_messages_open_the_conversation_as_they_are(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    options, tasks = source(tmp_path, [{"messages": messages, "answer": "hi", "difficulty": "easy"}] * 2)
    task = tasks.task("row/1")
    assert judge(options, task, "Hi")[0] == (Message(Role.SYSTEM, "be brief"), Message(Role.USER, "hi"))
    assert task.difficulty == "easy"


def test_held_out_rows_are_never_trained_on(tmp_path):
    _, tasks = source(tmp_path, NUMBERS, held_out_fraction=0.25)
    held_out = tasks.evaluation_keys(100)
    epoch = [tasks.key_at(position) for position in range(15)]
    assert len(held_out) == 5
    assert sorted(held_out + epoch) == sorted(f"row/{n}" for n in range(20))
    assert sorted(epoch) == sorted(tasks.key_at(position) for position in range(15, 30))
    assert epoch != [tasks.key_at(position) for position in range(15, 30)]


def test_the_split_is_the_seeds(tmp_path):
    splits = [source(tmp_path, NUMBERS, seed=seed)[1].evaluation_keys(2) for seed in (1, 1, 2)]
    assert splits[0] == splits[1] != splits[2]


def test_a_file_that_changed_is_read_again(tmp_path):
    source(tmp_path, NUMBERS)
    _, tasks = source(tmp_path, [{"prompt": "other", "answer": "x"}] * 3)
    assert tasks.task("row/0").data["messages"][0].content == "other"


@pytest.mark.parametrize("key", ["row/20", "row/-1", "train/1", "row/", "row/x"])
def test_a_key_without_a_row_is_refused(tmp_path, key):
    with pytest.raises(KeyError):
        source(tmp_path, NUMBERS)[1].task(key)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi"}, "rows.jsonl:2: the row has no `answer`"),
        ({"prompt": "hi", "answer": None}, "rows.jsonl:2: the row has no `answer`"),
        ({"answer": "x"}, "rows.jsonl:2: the row needs `messages` or a text `prompt`"),
        ({"prompt": 3, "answer": "x"}, "rows.jsonl:2: the row needs `messages` or a text `prompt`"),
        ({"messages": [], "answer": "x"}, "rows.jsonl:2: `messages` must be a list of at least one message: got []"),
        (
            {"messages": [{"role": "robot", "content": "x"}], "answer": "x"},
            "rows.jsonl:2: message 1: `role` must be one of system, user, assistant, tool: got 'robot'",
        ),
        (
            {"messages": [{"role": "user"}], "answer": "x"},
            "rows.jsonl:2: message 1 must be an object with a text `content`: got {'role': 'user'}",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "b"},
            "rows.jsonl:2: `messages` must end before the assistant's turn",
        ),
        ("{not json", "rows.jsonl:2: not valid JSON"),
        ("[1]", "rows.jsonl:2: a row must be an object: got list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, message):
    assert message in refusal(tmp_path, [{"prompt": "fine", "answer": "1"}, row])


def test_blank_lines_count_as_lines_but_not_as_rows(tmp_path):
    _, tasks = source(tmp_path, [*NUMBERS[:2], "", *NUMBERS[2:4]])
    assert tasks.task("row/3").data["row"]["answer"] == 6
    assert "rows.jsonl:3: the row has no `answer`" in refusal(tmp_path, [NUMBERS[0], "", {"prompt": "x"}])


@pytest.mark.parametrize("rows", [[], NUMBERS[:1]])
def test_too_few_rows_are_refused(tmp_path, rows):
    assert (
        f"needs at least 2 rows, to train on and, without an evaluation_path, to hold out: got {len(rows)}"
        in refusal(tmp_path, rows)
    )


def test_an_evaluation_file_without_rows_is_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "environment.options.evaluation_path needs at least 1 row" in refusal(
        tmp_path, NUMBERS, evaluation_path=str(empty)
    )


def test_a_file_that_is_not_there_is_named():
    options = SPEC.parse_options({"path": "nowhere.jsonl"})
    with pytest.raises(ConfigError, match=r"environment.options.path cannot be read: nowhere.jsonl \(No such file"):
        SPEC.tasks(options, 0)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be UTF-8 text"):
        SPEC.tasks(SPEC.parse_options({"path": str(path)}), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "path is required"),
        ({"path": "x", "extract": "("}, "extract must be a regular expression: got '('"),
        ({"path": "x", "extract": "x"}, "extract must have a group in parentheses around the answer: got 'x'"),
        ({"path": "x", "held_out_fraction": 1.0}, "held_out_fraction must be less than 1: got 1.0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError) as caught:
        SPEC.parse_options(options)
    assert message in str(caught.value)


def test_a_reward_function_that_is_not_there_is_refused_before_anything_runs(tmp_path):
    assert "has no `nothing`" in refusal(tmp_path, NUMBERS, reward="math:nothing")
    assert "must name a function: got float" in refusal(tmp_path, NUMBERS, reward="math:pi")


def test_evaluation_rows_may_have_a_file_of_their_own(tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "double 100", "answer": 200}))
    _, tasks = source(tmp_path, NUMBERS[:3], evaluation_path=str(held))
    assert tasks.evaluation_keys(10) == ["held/0"]
    assert tasks.task("held/0").data["row"]["answer"] == 200
    assert sorted(tasks.key_at(position) for position in range(3)) == ["row/0", "row/1", "row/2"]


def test_a_row_comes_as_often_as_its_weight_says(tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "double 100", "answer": 200}))
    rows = [{**row, "weight": 3 if row["answer"] == 0 else 1} for row in NUMBERS[:4]]
    _, tasks = source(tmp_path, rows, evaluation_path=str(held))
    walk = [tasks.key_at(position) for position in range(tasks.epoch_size * 300)]
    assert walk.count("row/0") == pytest.approx(3 * walk.count("row/1"), rel=0.1)


@pytest.mark.parametrize("weight", [0, -1, "2", True], ids=str)
def test_a_weight_that_is_none_is_refused_with_its_line(tmp_path, weight):
    rows = [NUMBERS[0], {**NUMBERS[1], "weight": weight}]
    assert f"rows.jsonl:2: `weight` must be a number over 0: got {weight!r}" in refusal(tmp_path, rows)
