"""What a policy might try instead of mending the code is worth nothing."""

import ast
import json

import pytest
from code_repair_attempts import ATTEMPTS
from code_repair_fixtures import Subprocesses, adding, call, play, turns_of

from sao_core.environments.code_repair.outcomes import Case, Expected

SUBMIT = call("submit")
TEST = "tests/test_adding.py"


def write(text, path="adding.py"):
    return call("write_file", path=path, content=text)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_earns_nothing(name):
    *_, last = play(adding(), [*turns_of(ATTEMPTS[name]), SUBMIT], test_wall_s=1.0)
    assert last.terminated
    assert last.reward == 0.0
    assert last.info["reward_parts"]["solved"] == 0.0


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_python_so_that_it_fails_for_what_it_does(name):
    for text in ATTEMPTS[name].values():
        ast.parse(text or "")


def test_the_same_tricks_do_not_spoil_a_repair_that_is_right():
    right = "def add(a, b):\n    print('adding')\n    return a + b\n"
    turns = [write(right), write("raise SystemExit\n", "json.py"), write("raise SystemExit\n", "tests/conftest.py")]
    assert play(adding(), [*turns, call("delete_file", path=TEST), SUBMIT])[-1].reward == 1.0


def test_hidden_inputs_reach_the_sandbox_only_with_the_verdict_and_right_values_never_do():
    runner = Subprocesses()
    play(adding(), [call("run_tests"), SUBMIT], runner=runner)
    testing, judging = (json.dumps(run) for run in runner.runs)
    assert "90210" not in testing
    assert "90210" in judging
    assert str(90210 + 55555) not in testing + judging


def test_arguments_that_must_stay_are_looked_at_after_the_call():
    hidden = [Expected(Case("add", ([3, 1], [2])), [1, 2, 3])]
    check = adding().data["repair"].check
    verdicts = []
    for source in ("    a.extend(b)\n    return sorted(a)\n", "    return sorted(a + b)\n"):
        task = adding(f"def add(a, b):\n{source}")
        repair = task.data["repair"]
        object.__setattr__(repair, "check", type(check)(check.modules, (), tuple(hidden), 0))
        verdicts.append(play(task, [SUBMIT])[-1].reward)
    assert verdicts == [0.0, 1.0]


@pytest.mark.parametrize(
    ("error", "reward"),
    [
        ("ValueError", 1.0),
        ("UnicodeError", 1.0),
        ("TypeError", 0.0),
        ("Exception", 0.0),
        ("type('ValueError', (Exception,), {})", 0.0),
    ],
    ids=["itself", "a kind of it", "another", "a wider one", "one of that name"],
)
def test_an_exception_counts_as_assert_raises_would_have_it(error, reward):
    check = adding().data["repair"].check
    task = adding(f"def add(a, b):\n    raise {error}\n")
    hidden = (Expected(Case("add", (1, 2)), raises="ValueError"),)
    object.__setattr__(task.data["repair"], "check", type(check)(check.modules, (), hidden, 0))
    assert play(task, [SUBMIT])[-1].reward == reward
