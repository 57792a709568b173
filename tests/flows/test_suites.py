"""Suites: every shipped one parses, a file's mistakes are found by line, and one becomes the run that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.recipes import load_config
from flows.suites import evaluation_config, load_suite, split_settings, suite_names, suite_of_run, suite_summary
from sao_core.config import ConfigError
from sao_core.environments import base as environments


def refusal(suite: str, changes: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_suite(suite, changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", suite_names())
def test_every_shipped_suite_fits_its_environment_and_says_what_it_asks(name: str, tmp_path: Path) -> None:
    changes = {}
    if load_suite(name).every_row:
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"problem": "1+1?", "answer": 2}\n')
        changes = {"environment.options.path": str(rows)}
    suite = load_suite(name, changes)
    assert suite.name == name
    assert len(suite_summary(name)) > 20
    config = evaluation_config(suite, "tiny")
    assert (config.evaluation.alone, config.suite, config.recipe) == (True, name, f"evaluate-{name}")
    if suite.environment.name in environments.names():
        spec = environments.get(suite.environment.name)
        spec.parse_options(config.environment.options)


def test_the_aime_suite_asks_as_the_paper_does(tmp_path: Path) -> None:
    path = str(tmp_path / "aime.jsonl")
    config = evaluation_config(load_suite("aime", {"environment.options.path": path}), "tiny")
    evaluation = config.evaluation
    assert (evaluation.samples_per_prompt, evaluation.temperature, evaluation.top_p, evaluation.top_k) == (16, 1, 1, 0)
    assert config.rollout.max_turns == 50
    assert config.environment.options["evaluation_path"] == path, "every row is asked"
    with pytest.raises(
        ConfigError, match=r"suite aime asks every row of a file: name it, --set environment.options.path"
    ):
        evaluation_config(load_suite("aime"), "tiny")


def test_any_file_of_questions_is_a_suite_of_all_its_rows(tmp_path: Path) -> None:
    rows = tmp_path / "capitals.jsonl"
    rows.write_text('{"prompt": "France?", "answer": "Paris"}\n\n{"prompt": "Spain?", "answer": "Madrid"}\n')
    suite = load_suite(str(rows))
    assert (suite.name, suite.environment.name, suite.prompts) == ("capitals", "jsonl", 2)
    config = evaluation_config(suite, "tiny")
    spec = environments.get("jsonl")
    tasks = spec.tasks(spec.parse_options(config.environment.options), config.seed)
    assert len(tasks.evaluation_keys(config.evaluation.prompts)) == 2


def test_a_suite_of_your_own_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("environment: {name: calculator}\nsamples: 3\n")
    assert (load_suite(str(path)).name, load_suite(str(path)).samples) == ("mine", 3)


WRONG = {
    "an unknown field": (
        "environment:\n  name: calculator\n\npromts: 3\n",
        ":4: unknown setting `promts`; did you mean `prompts`?",
    ),
    "a field of a section": (
        "environment: {name: calculator}\nlimits:\n  max_turns: 0\n",
        ":3: limits.max_turns must be greater than or equal to 1: got 0",
    ),
    "a value of another kind": ("environment:\n  name: [a]\n", ":2: environment.name must be a valid string"),
    "a field that lacks": ("samples: 3\n", "environment is required"),
    "no mapping": ("- a\n", "must hold a mapping of settings: got list"),
    "no YAML": ("a: [\n", "is not valid YAML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_file_names_file_line_and_field(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    found = refusal(str(path))
    assert found.startswith(str(path))
    assert message in found


def test_what_is_no_suite_is_told() -> None:
    assert refusal("calculater").startswith("unknown suite `calculater`; did you mean `calculator`?")
    assert refusal("nowhere.yaml") == "no such suite file: nowhere.yaml; `sao suites` lists the shipped ones"
    assert refusal("nowhere.jsonl").startswith("--suite cannot be read: nowhere.jsonl")


def test_an_empty_file_of_questions_is_told(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert refusal(str(path)) == f"--suite {path} has no rows"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples must be greater than or equal to 1: got 0"),
        ({"temperature": 0.0}, "temperature must be greater than 0: got 0.0"),
        ({"limits.max_turns": "many"}, "limits.max_turns must be a valid integer"),
    ],
    ids=["samples", "temperature", "limits"],
)
def test_changes_that_do_not_fit_are_told(changes: Mapping[str, Any], message: str) -> None:
    assert refusal("calculator", changes).startswith(message)


def test_settings_go_to_the_suite_or_to_the_machine() -> None:
    suite, machine = split_settings(
        [
            "environment.options.max_operations=2",
            "limits.max_turns=3",
            "top_p=0.9",
            "rollout.slots=4",
            "model.dtype=bfloat16",
        ]
    )
    assert suite == {"environment.options.max_operations": 2, "limits.max_turns": 3, "top_p": 0.9}
    assert machine == {"rollout.slots": 4, "model.dtype": "bfloat16"}
    config = evaluation_config(load_suite("calculator", suite), "tiny", machine)
    assert (config.rollout.max_turns, config.rollout.slots, config.evaluation.top_p) == (3, 4, 0.9)
    assert config.environment.options == {"max_operations": 2}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sampels=3", "an evaluation has no setting `sampels`; did you mean `samples`?"),
        ("policy.lr=1", "an evaluation has no setting `policy.lr`"),
        ("rollout.max_turns=3", "an evaluation has no setting `rollout.max_turns`; did you mean `limits.max_turns`?"),
        ("samples", "--set needs KEY=VALUE: got 'samples'"),
    ],
    ids=["a typing error", "a setting of training", "a limit of the machine's", "no value"],
)
def test_settings_of_neither_are_told(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_settings([setting])
    assert str(caught.value).startswith(message)


def test_a_run_s_own_tasks_are_a_suite_and_its_machine_s_settings_are_kept() -> None:
    trained = load_config("tiny", ["evaluation.prompts=7", "seed=3", "model.dtype=bfloat16", "rollout.workers=2"])
    suite = suite_of_run(trained, {"samples": 5})
    assert (suite.name, suite.prompts, suite.samples, suite.seed) == ("calculator", 7, 5, 3)
    assert suite.limits.max_action_tokens == trained.rollout.max_action_tokens
    config = evaluation_config(suite, "run:r@4", like=trained.model_dump(mode="json"))
    assert (config.model.path, config.model.dtype) == ("run:r@4", "bfloat16")
    assert (config.rollout.slots, config.rollout.workers) == (trained.rollout.slots, 2)
    assert config.environment == trained.environment
