import json
import re

import pytest
from code_repair_fixtures import SPEC, Subprocesses, call, play

from sao_core.config import ConfigError
from sao_core.trajectory import Message, Role

SUBMIT = call("submit")
VISIBLE = """import unittest
from shop import total

class ShopTest(unittest.TestCase):
    def test_one(self):
        self.assertEqual(total([2]), 2)
"""
HIDDEN = """import unittest
from shop import total

class HiddenTest(unittest.TestCase):
    def test_none(self):
        self.assertEqual(total([]), 0)

    def test_many(self):
        self.assertEqual(total([2, 3, 4]), 9)

def test_function():
    assert total([1, 1]) == 2
"""
WRONG = "def total(prices):\n    return sum(prices[:1])\n"
RIGHT = "def total(prices):\n    return sum(prices)\n"
ROW = {
    "id": "shop-1",
    "files": {"shop.py": WRONG, "README": "a shop"},
    "tests": {"tests/test_shop.py": VISIBLE},
    "hidden_tests": {"tests/test_hidden.py": HIDDEN},
    "difficulty": 3,
}


def rows(*changes):
    return [{**ROW, "id": f"shop-{number}", **change} for number, change in enumerate(changes or ({}, {}), start=1)]


def source(tmp_path, given, seed=0, **options):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in given))
    return SPEC.tasks(SPEC.parse_options({"path": str(path), **options}), seed)


def judged(task, *turns, **options):
    return play(task, [*turns, SUBMIT], **options)[-1]


def write(text, path="shop.py"):
    return call("write_file", path=path, content=text)


def test_a_row_is_shown_and_its_hidden_tests_judge(tmp_path):
    task = source(tmp_path, rows()).task("own/shop-2")
    assert task.difficulty == "3"
    assert task.data["repair"].request.endswith("Files:\nREADME\nshop.py\ntests/test_shop.py")
    results = play(task, [call("list_files"), call("run_tests"), write(RIGHT), SUBMIT])
    assert [message.role for message in results[0].observation] == [Role.TOOL]
    assert "hidden" not in results[0].observation[0].content
    assert results[1].observation[0].content == "1 test, 0 failed"
    assert (results[-1].reward, results[-1].info["instance_id"]) == (1.0, "shop-2")
    assert judged(task).reward == 0.0


def test_a_statement_of_your_own_opens_the_conversation(tmp_path):
    import asyncio

    from code_repair_fixtures import environment

    task = source(tmp_path, rows({}, {"statement": "total() forgets prices."})).task("own/shop-2")
    opening = asyncio.run(environment(Subprocesses()).reset(task))
    assert opening == (Message(Role.USER, "total() forgets prices.\n\nFiles:\nREADME\nshop.py\ntests/test_shop.py"),)


def test_a_partial_reward_counts_hidden_tests_beyond_those_that_passed_before(tmp_path):
    task = source(tmp_path, rows()).task("own/shop-1")
    half = "def total(prices):\n    return sum(prices[:2])\n"
    worse = "def total(prices):\n    return None\n"
    results = [judged(task, write(text), reward="partial") for text in (RIGHT, half, worse)]
    assert [result.reward for result in results] == [1.0, 0.5, 0.0]
    assert [result.info["reward_parts"]["hidden_passed"] for result in results] == pytest.approx([1, 2 / 3, 0])


@pytest.mark.parametrize(
    "changes",
    [
        {"tests/test_hidden.py": "def test_function():\n    pass\n"},
        {"tests/test_shop.py": ""},
        {"shop.py": f"import os\nos._exit(0)\n{WRONG}"},
        {"shop.py": f"import unittest\nunittest.TestCase.assertEqual = lambda *_: os._exit(0)\n{WRONG}"},
        {"shop.py": f'for _ in range(9):\n    print(\'["", "", ""]\')\n{WRONG}'},
        {"shop.py": "import unittest\ndef total(prices):\n    raise unittest.SkipTest\n"},
        {"shop.py": f"import sys\nsys.modules['tests.test_hidden'] = sys\n{WRONG}"},
        {"conftest.py": "import os\nos._exit(0)\n", "sitecustomize.py": "import os\nos._exit(0)\n"},
        {"unittest.py": "import os\nos._exit(0)\n", "json.py": "import os\nos._exit(0)\n"},
        {"shop.py": "def total(prices):\n    while True:\n        pass\n"},
    ],
    ids=["hidden", "tests", "exit", "patch", "print", "skip", "module", "start-up", "shadow", "loop"],
)
def test_shortcuts_earn_nothing(tmp_path, changes):
    task = source(tmp_path, rows()).task("own/shop-1")
    assert judged(task, *(write(text, path) for path, text in changes.items()), test_wall_s=1.5).reward == 0.0


def test_a_visible_test_that_fails_keeps_the_reward_back(tmp_path):
    odd = VISIBLE.replace("total([2]), 2", "total([2]), 3")
    task = source(tmp_path, rows({"tests": {"tests/test_shop.py": odd}}, {})).task("own/shop-1")
    assert judged(task, write(RIGHT)).reward == 0.0


def test_a_hidden_test_may_take_the_place_of_a_visible_one(tmp_path):
    task = source(tmp_path, rows({"hidden_tests": {"tests/test_shop.py": HIDDEN}}, {})).task("own/shop-1")
    assert judged(task, write(RIGHT)).reward == 1.0
    assert judged(task).reward == 0.0


def test_an_async_function_is_a_test_that_runs(tmp_path):
    hidden = "from shop import total\n\nasync def test_many():\n    assert total([2, 3]) == 5\n"
    task = source(tmp_path, rows({"hidden_tests": {"tests/test_hidden.py": hidden}}, {})).task("own/shop-1")
    assert [judged(task).reward, judged(task, write(RIGHT)).reward] == [0.0, 1.0]


def test_pytest_runs_tests_that_need_it(tmp_path):
    text = (
        "import pytest\nfrom shop import total\n\n@pytest.fixture\ndef two():\n    return 2\n\n"
        "@pytest.mark.parametrize('n', [0, 3])\ndef test_n(n, two):\n    assert total([two] * n) == two * n\n"
        "\ndef test_none(two):\n    assert total([]) == 0\n"
    )
    change = {"hidden_tests": {"tests/test_hidden.py": text}}
    task = source(tmp_path, rows(change, {}), test_runner="pytest").task("own/shop-1")
    assert judged(task, write(RIGHT), write("import os\nos._exit(0)\n", "conftest.py")).reward == 1.0


def test_a_folder_with_a_folder_per_task_holds_the_same(tmp_path):
    for name in ("first", "second"):
        for field in ("files", "tests", "hidden_tests"):
            for path, text in ROW[field].items():
                place = tmp_path / name / field / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
    (tmp_path / "second" / "task.json").write_text('{"difficulty": "easy", "statement": "wrong sum"}')
    tasks = SPEC.tasks(SPEC.parse_options({"path": str(tmp_path)}), 0)
    task = tasks.task("own/second")
    assert (task.difficulty, task.data["repair"].request.splitlines()[0]) == ("easy", "wrong sum")
    assert judged(task, write(RIGHT)).reward == 1.0


def test_some_tasks_are_held_out_or_all_of_another_file(tmp_path):
    tasks = source(tmp_path, rows(*[{}] * 10), held_out_fraction=0.2)
    held_out = tasks.evaluation_keys(10)
    assert sorted(held_out + [tasks.key_at(position) for position in range(8)]) == sorted(
        f"own/shop-{number}" for number in range(1, 11)
    )
    other = tmp_path / "held.jsonl"
    other.write_text(json.dumps({**ROW, "id": "other"}))
    tasks = source(tmp_path, rows(), evaluation_path=str(other))
    assert tasks.evaluation_keys(10) == ["own/other"]
    assert tasks.epoch_size == 2
    with pytest.raises(ConfigError, match="evaluation_path must hold other tasks than path: both have other"):
        source(tmp_path, [*rows(), {**ROW, "id": "other"}], evaluation_path=str(other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 7}, "tasks.jsonl:2: `id` must be a text: got 7"),
        ({"id": "shop-1"}, "tasks.jsonl:2: `id` must be another for each task: 'shop-1' comes again"),
        ({"hidden_test": {}}, "tasks.jsonl:2: there is no field `hidden_test`; did you mean `hidden_tests`?"),
        ({"files": []}, "tasks.jsonl:2: `files` must be an object of path → text: got list"),
        ({"files": {}}, "tasks.jsonl:2: `files` must hold at least one file"),
        ({"files": {"a.py": 1}}, "tasks.jsonl:2: `files`: a.py must be a text: got int"),
        ({"files": {"../a.py": ""}}, "tasks.jsonl:2: `files`: a path must be relative to the repository"),
        ({"hidden_tests": {}}, "tasks.jsonl:2: `hidden_tests` must hold at least one file"),
        ({"hidden_tests": {"t.py": "x = 1"}}, "tasks.jsonl:2: `hidden_tests` must name at least one test for unittest"),
        ({"hidden_tests": {"t.py": "x ="}}, "tasks.jsonl:2: `hidden_tests`: t.py:1 is no Python (invalid syntax)"),
        ({"tests": {"shop.py": ""}}, "tasks.jsonl:2: `files` and `tests` must not both hold shop.py"),
        ({"statement": 1}, "tasks.jsonl:2: `statement` must be a text: got 1"),
        ({"weight": 0}, "tasks.jsonl:2: `weight` must be a number over 0: got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_row_names_file_line_and_field(tmp_path, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        source(tmp_path, rows({}, change))
    assert "\n" not in str(caught.value)


def test_a_wrong_folder_is_named(tmp_path):
    (tmp_path / "first" / "files").mkdir(parents=True)
    (tmp_path / "first" / "files" / "a.py").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"first/files/a\.py: it must be UTF-8 text"):
        SPEC.tasks(SPEC.parse_options({"path": str(tmp_path)}), 0)
    (tmp_path / "first" / "files" / "a.py").write_text("")
    (tmp_path / "first" / "task.json").write_text('{"id": "x"}')
    with pytest.raises(
        ConfigError, match=r"first/task\.json: it must be an object of statement, difficulty and weight"
    ):
        SPEC.tasks(SPEC.parse_options({"path": str(tmp_path)}), 0)


def test_an_evaluation_path_alone_is_refused():
    with pytest.raises(ConfigError, match="evaluation_path needs a path to train on"):
        SPEC.parse_options({"evaluation_path": "x.jsonl"})
