import asyncio
import subprocess

import pytest
from code_repair_fixtures import Broken, Subprocesses, adding, bundled, call, environment, fixed, play

from sao_core.environments.code_repair.judging import SandboxBroke
from sao_core.outside import NotLent
from sao_core.trajectory import Role

RIGHT = "def add(a, b):\n    return a + b\n"
FIX = call("replace_text", path="adding.py", old="a - b", new="a + b")
SUBMIT = call("submit")


def shown(result):
    return [message.content for message in result.observation]


def parts(results, name):
    return [result.info["reward_parts"].get(name) for result in results]


@pytest.mark.parametrize("key", ["train/0", "train/1", "evaluation/2"], ids=["easy", "medium", "hard"])
def test_the_right_fix_of_a_bundled_task_earns_the_reward_and_none_earns_nothing(key):
    task = bundled(key)
    path, text = fixed(task)
    unchanged = play(task, [SUBMIT])[-1]
    mended = play(task, [call("write_file", path=path, content=text), SUBMIT])[-1]
    assert (unchanged.reward, unchanged.terminated) == (0.0, True)
    assert (mended.reward, mended.terminated) == (1.0, True)


def test_a_turn_of_looking_editing_testing_and_submitting():
    look, read, before, edit, after, end = results = play(
        adding(),
        [call("list_files"), call("read_file", path="adding.py"), call("run_tests"), FIX, call("run_tests"), SUBMIT],
    )
    assert shown(look) == ["adding.py (2 lines)\ntests/test_adding.py (10 lines)"]
    assert shown(read) == ["def add(a, b):\n    return a - b\n"]
    assert shown(before) == ["2 tests, 1 failed\nFAIL tests/test_adding.py AddTest test_add_1: AssertionError: -1 != 3"]
    assert shown(edit) == ["done"]
    assert shown(after) == ["2 tests, 0 failed"]
    assert all(message.role is Role.TOOL for result in results for message in result.observation)
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.terminated for result in results] == [False] * 5 + [True]
    assert parts(results, "tool_calls") == [1] * 6
    assert parts(results, "edits") == [0, 0, 0, 1, 0, 0]
    assert parts(results, "test_runs") == [0, 0, 1, 0, 1, 0]
    assert parts(results, "solved") == [None] * 5 + [1.0]
    assert parts(results, "hidden_passed")[-1] == 1.0
    assert not any(result.truncated for result in results)
    assert end.info["instance_id"] == "hand"


def test_a_turn_without_a_call_hands_in_what_there_is():
    assert play(adding(), [FIX, "It adds now."])[-1].reward == 1.0
    assert play(adding(), ["It adds already."])[-1].reward == 0.0


def test_several_calls_in_a_turn_are_answered_one_by_one():
    results = play(adding(), [f"{call('list_files')}\n{FIX}\n{call('read_file', path='adding.py')}", f"{FIX}{SUBMIT}"])
    assert shown(results[0])[1:] == ["done", RIGHT]
    assert parts(results, "edits") == [1, 0]
    assert results[1].reward == 1.0


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (call("read_file", path="missing.py"), "error: there is no file 'missing.py'"),
        (
            call("replace_text", path="adding.py", old="a * b", new=""),
            "error: `old` must occur exactly once in adding.py, and it is not",
        ),
        (
            call("replace_text", path="adding.py", old="a", new="b"),
            "error: `old` must occur exactly once in adding.py, and it is there",
        ),
        (call("replace_text", path="adding.py", old="", new="b"), "error: `old` must not be empty"),
        (call("write_file", path="../adding.py", content=""), "error: a path must be relative"),
        (call("write_file", path="/etc/passwd", content=""), "error: a path must be relative"),
        (call("write_file", path="a//b.py", content=""), "error: a path must be relative"),
        (call("write_file", path=".git/config", content=""), "error: a path must not hold"),
        (call("write_file", path="adding.py/x.py", content=""), "error: adding.py/x.py cannot be both"),
        (call("write_file", path="tests", content=""), "error: tests cannot be both"),
        (call("write_file", path="x.py", content="#" * 100_001), "error: a file may have 100000 characters"),
        (call("write_file", path="x.py", content="\0"), "error: a file must be text"),
        (call("delete_file", path="x.py"), "error: there is no file 'x.py'"),
        (call("read_file", file="adding.py"), "error: arguments of `read_file`"),
        (call("shell", command="ls"), "error: there is no function `shell`"),
        ("<tool_call>{]</tool_call>", "error: the tool call is not valid JSON"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_done_is_told_and_changes_nothing(turn, answer):
    refused, listed = results = play(adding(), [turn, call("list_files")])
    assert shown(refused)[0].startswith(answer)
    assert shown(listed) == ["adding.py (2 lines)\ntests/test_adding.py (10 lines)"]
    assert parts(results, "edits") == [0, 0]
    assert "patch" not in refused.info


def test_a_repository_cannot_outgrow_the_sandbox():
    """Files that do not fit would break the rollout, which costs a policy less than a repair that is wrong."""
    large = [call("write_file", path=f"{number}.py", content="#" * 99_000) for number in range(21)]
    results = play(adding(), large)
    assert [shown(result) for result in results[:-1]] == [["done"]] * 20
    assert shown(results[-1]) == ["error: all files together may have 2000000 characters"]
    long_name = play(adding(), [call("write_file", path="é" * 120, content="")])
    assert shown(long_name[0])[0].startswith("error: a path must be relative")


def test_new_files_help_and_deleted_ones_are_gone():
    results = play(
        adding(),
        [
            call("write_file", path="deep/plus.py", content="def plus(a, b):\n    return a + b\n"),
            call("write_file", path="adding.py", content="from deep.plus import plus as add\n"),
            call("delete_file", path="tests/test_adding.py"),
            call("run_tests"),
            SUBMIT,
        ],
    )
    assert shown(results[3]) == ["there are no tests"]
    assert results[-1].reward == 1.0


def test_the_turn_budget_ends_an_episode_without_a_reward():
    results = play(adding(), [FIX, call("list_files")], max_turns=2)
    assert [(result.reward, result.truncated, result.terminated) for result in results] == [
        (0.0, False, False),
        (0.0, True, False),
    ]
    assert "+    return a + b" in results[-1].info["patch"]
    assert play(adding(), [FIX, SUBMIT], max_turns=2)[-1].reward == 1.0


def test_a_partial_reward_counts_hidden_calls_beyond_those_that_passed_before():
    worse = "def add(a, b):\n    return a - b if a != b else 1\n"
    half = "def add(a, b):\n    return a + b if a > 9 else a - b\n"
    rewards = [
        play(adding(), [call("write_file", path="adding.py", content=text), SUBMIT], reward="partial")[-1]
        for text in (RIGHT, half, worse, "def add(a, b):\n    return a - b\n", "")
    ]
    assert [result.reward for result in rewards] == pytest.approx([1, 2 / 3, 0, 0, 0])
    assert [result.info["reward_parts"]["hidden_passed"] for result in rewards] == [1.0, 0.75, 0.0, 0.25, 0.0]
    assert [result.info["reward_parts"]["solved"] for result in rewards] == [1, 0, 0, 0, 0]


def test_an_episode_goes_on_elsewhere_with_its_edits_and_turns():
    async def episode():
        begun, resumed = (environment(Subprocesses(), max_turns=4) for _ in range(2))
        await begun.reset(adding())
        await begun.step(FIX)
        await begun.step(call("write_file", path="new.py", content="x = 1\n"))
        await begun.step(call("delete_file", path="tests/test_adding.py"))
        state = begun.state()
        await resumed.restore(adding(), state)
        assert resumed.state() == state
        return state, await resumed.step(call("list_files"))

    state, result = asyncio.run(episode())
    assert state == {"turns": 3, "changes": {"adding.py": RIGHT, "new.py": "x = 1\n", "tests/test_adding.py": None}}
    assert result.truncated
    assert result.info["patch"].count("diff --git") == 3


def test_the_patch_makes_the_repaired_files_of_the_given_ones(tmp_path):
    files = {"a.py": "one\ntwo", "b.py": "gone\n", "c/d.py": "odd\x0c line\n"}
    task = adding()
    task.data["repair"].files.update(files)
    results = play(
        task,
        [
            call("write_file", path="a.py", content="one\nthree"),
            call("delete_file", path="b.py"),
            call("replace_text", path="c/d.py", old="line", new="end"),
            call("write_file", path="e.py", content="new\n"),
            call("write_file", path="empty.py", content=""),
        ],
    )
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(command, cwd=tmp_path, input=results[-1].info["patch"], text=True, check=True, timeout=30)
    made = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert made == {"a.py": "one\nthree", "c/d.py": "odd\x0c end\n", "e.py": "new\n", "empty.py": ""}


def test_a_report_of_tests_is_short_and_the_same_every_time():
    cases = "".join(f"    def test_{n:02d}(self):\n        self.assertEqual([object()] * 50, {n})\n" for n in range(12))
    text = f"import unittest\n\n\nclass ManyTest(unittest.TestCase):\n{cases}"
    turns = [call("write_file", path="tests/test_adding.py", content=text), call("run_tests"), call("run_tests")]
    _, first, second = play(adding(), turns)
    lines = shown(first)[0].splitlines()
    assert lines[0] == "12 tests, 12 failed"
    assert lines[-1] == "and 4 more"
    assert max(map(len, lines)) <= 240
    assert shown(first) == shown(second)
    assert "0x" not in shown(first)[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("while True:\n    pass\n", "not all tests ran: they did not end in time: 0.7 s"),
        ("import os\nos._exit(0)\n", "not all tests ran: the program ended before the tests did"),
        ("def add(a b)\n", "FAIL tests/test_adding.py: SyntaxError: invalid syntax"),
        ("raise SystemExit\n", "FAIL tests/test_adding.py: SystemExit"),
    ],
    ids=["loop", "exit", "syntax", "system exit"],
)
def test_a_test_run_that_breaks_is_told(text, line):
    turns = [call("write_file", path="adding.py", content=text), call("run_tests")]
    assert line in shown(play(adding(), turns, test_wall_s=0.7)[-1])[0]


def test_a_long_file_is_shown_without_its_middle():
    turns = [call("write_file", path="x.py", content="a" * 500 + "b" * 500), call("read_file", path="x.py")]
    text = shown(play(adding(), turns, max_read_chars=200)[-1])[0]
    assert text == f"{'a' * 100}\n[800 characters left out]\n{'b' * 100}"


@pytest.mark.parametrize("turn", ["submit", "run_tests"])
def test_a_sandbox_that_breaks_is_no_verdict(turn):
    with pytest.raises(SandboxBroke, match="no room left"):
        play(adding(), [call(turn)], runner=Broken())


def test_without_a_sandbox_there_is_no_episode():
    with pytest.raises(NotLent, match="sao doctor"):
        environment(None)


def test_the_prompt_can_leave_out_instructions_and_tools():
    async def opened(**options):
        playing = environment(Subprocesses(), **options)
        return await playing.reset(adding()), playing.shown_tools

    (full,), tools = asyncio.run(opened())
    (bare,), none = asyncio.run(opened(instructions=False, show_tools=False))
    assert full.content == "add is wrong"
    assert bare.content == "adding.py\ntests/test_adding.py"
    assert ([tool["function"]["name"] for tool in tools][-2:], none) == (["run_tests", "submit"], ())
