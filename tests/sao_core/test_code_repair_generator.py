import copy
import hashlib
import json
import subprocess
import sys
import time

import pytest
from code_repair_fixtures import SPEC, bundled, fixed

from sao_core.config import ConfigError
from sao_core.environments.code_repair import catalogue
from sao_core.environments.code_repair.levels import SHAPES, Level
from sao_core.environments.code_repair.outcomes import same

KEYS = [f"{split}/{number}" for split in ("train", "evaluation") for number in range(6)]


def value(files, expected):
    """What plain Python makes of a call, without anything of the generator's."""
    names = {}
    for path, text in files.items():
        if not path.startswith("tests/"):
            exec(text, names)
    arguments = copy.deepcopy(expected.case.arguments)
    try:
        found = names[expected.case.function](*arguments)
        return found if arguments == expected.case.arguments else "changed its arguments"
    except Exception as error:
        return type(error).__name__


def right(files, expected):
    wanted = expected.raises or expected.value
    return same(wanted, value(files, expected))


def repaired(task):
    path, text = fixed(task)
    return {**task.data["repair"].files, path: text}


def run_visible(files, tmp_path):
    """The names of the failing tests, as Python's own unittest finds and runs them."""
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-B", "-m", "unittest", "discover", "tests"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("key", KEYS)
def test_visible_and_hidden_calls_tell_the_broken_version_from_the_right_one(key):
    task = bundled(key)
    repair = task.data["repair"]
    whole = repaired(task)
    check = repair.check
    assert all(right(whole, one) for one in (*check.visible, *check.hidden))
    stateless = repair.mistake.kind != "mutable default"
    assert not stateless or sum(not right(repair.files, one) for one in check.visible) >= 1
    failing = [one for one in check.hidden if not right(repair.files, one)]
    assert not stateless or len(check.hidden) - check.passed_broken == len(failing) >= 3
    seen = {repr(one.case) for one in check.visible}
    assert not seen & {repr(one.case) for one in check.hidden}


@pytest.mark.parametrize("number", range(3), ids=list(Level))
def test_the_repository_fails_its_own_tests_until_it_is_mended(number, tmp_path):
    task = bundled(f"train/{number}")
    code, said = run_visible(task.data["repair"].files, tmp_path)
    assert code == 1
    assert "FAILED" in said
    code, said = run_visible(repaired(task), tmp_path)
    assert (code, said.strip().splitlines()[-1]) == (0, "OK")


def test_levels_take_turns_and_have_their_sizes():
    for number in range(12):
        task = bundled(f"train/{number}")
        files, level = task.data["repair"].files, list(Level)[number % 3]
        sources = [path for path in files if not path.startswith("tests/")]
        assert task.difficulty == level
        assert SHAPES[level].modules[0] <= len(sources) <= SHAPES[level].modules[1]
        assert ("Failing test: test_" in task.data["repair"].request) == SHAPES[level].named


def test_a_named_test_that_fails_is_one_that_fails(tmp_path):
    task = bundled("train/0")
    name = task.data["repair"].request.rpartition("Failing test: ")[2].split()[0]
    assert f"FAIL: {name} " in run_visible(task.data["repair"].files, tmp_path)[1]


def test_some_hard_mistakes_are_in_a_helper_that_no_test_calls():
    hidden = 0
    for number in range(2, 38, 3):
        repair = bundled(f"train/{number}").data["repair"]
        hidden += repair.mistake.function not in {one.case.function for one in repair.check.visible}
    assert 2 <= hidden <= 9


def test_evaluation_asks_for_functions_that_are_never_trained_on():
    trained, evaluated = set(), set()
    tasks = SPEC.tasks(SPEC.parse_options({}), 0)
    for number in range(9):
        for names, key in ((trained, tasks.key_at(number)), (evaluated, tasks.evaluation_keys(9)[number])):
            names |= tasks.task(key).data["repair"].check.modules.keys()
    assert trained & catalogue.HELD_OUT == set()
    assert evaluated - catalogue.HELD_OUT == set()


def digest(seed):
    tasks = [bundled(key, seed).data["repair"] for key in ("train/0", "evaluation/1")]
    text = json.dumps([[task.request, dict(task.files), repr(task.check)] for task in tasks])
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_seed_gives_the_same_tasks_in_another_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_code_repair_generator import digest; print(digest(3))"
    )
    command = [sys.executable, "-c", code, __file__.rpartition("/")[0]]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONHASHSEED": "7"}, check=True)
    assert other.stdout.strip() == digest(3) != digest(4)


def test_a_fixed_number_of_tasks_comes_back_in_shuffled_epochs():
    tasks = SPEC.tasks(SPEC.parse_options({"train_tasks": 6}), 0)
    first, second = ([tasks.key_at(position) for position in range(start, start + 6)] for start in (0, 6))
    assert sorted(first) == sorted(second) == [f"train/{number}" for number in range(6)]
    assert first != second
    assert tasks.epoch_size == 6


@pytest.mark.parametrize("key", ["train", "train/x", "test/1", "train/²", ""])
def test_an_unknown_key_is_a_key_error(key):
    with pytest.raises(KeyError):
        bundled(key)


def test_levels_can_be_chosen():
    assert {bundled(f"train/{number}", levels=["hard"]).difficulty for number in range(3)} == {"hard"}


def test_no_level_at_all_is_refused():
    with pytest.raises(ConfigError, match="levels must name at least one of easy, medium, hard"):
        SPEC.parse_options({"levels": []})


def test_tasks_are_many_and_quickly_made():
    started = time.process_time()
    sources = {bundled(f"train/{number}", seed=5).data["repair"].mistake.wrong for number in range(30)}
    assert len(sources) >= 26
    assert (time.process_time() - started) / 30 < 0.05


@pytest.mark.long
def test_there_are_several_hundred_distinct_tasks_of_all_kinds():
    mistakes = [bundled(f"train/{number}", seed=6).data["repair"].mistake for number in range(900)]
    assert len({mistake.wrong for mistake in mistakes}) >= 500
    assert len({mistake.function for mistake in mistakes}) >= 75
    assert len({mistake.kind for mistake in mistakes}) >= 25
