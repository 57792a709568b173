"""`sao evaluate`, `sao compare`, `sao predictions`, `sao suites`: bad input in one line, and a whole evaluation."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from short_run import Home

from flows import cli
from flows.views import run_summary
from infra.viewer import trajectory_view

FEW = ("--prompts", "3", "--samples", "2", "--set", "rollout.slots=4", "--set", "limits.max_action_tokens=12")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def sao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command, in this process and a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("SAO_HOME", "SAO_DATABASE_URL", "SAO_OBJECT_STORE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["sao", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        printed = capsys.readouterr()
        return Said(int(left.value.code or 0), printed.out, printed.err)

    return run


BAD = {
    "an unknown suite": (["evaluate", "tiny", "--suite", "calculater"], "unknown suite `calculater`; did you mean"),
    "no suite for a model": (["evaluate", "tiny"], "name a suite for tiny: --suite NAME or --suite FILE.jsonl"),
    "nothing to evaluate": (["evaluate", "--suite", "calculator"], "name what to evaluate"),
    "an unknown run": (["evaluate", "nobody", "--suite", "calculator"], "'nobody' is neither a run, a model folder"),
    "no samples": (["evaluate", "tiny", "--suite", "calculator", "--samples", "0"], "samples must be greater than or"),
    "no prompts": (["evaluate", "tiny", "--suite", "calculator", "--prompts", "-1"], "prompts must be greater than or"),
    "a temperature of 0": (
        ["evaluate", "tiny", "--suite", "calculator", "--temperature", "0"],
        "temperature must be greater than 0",
    ),
    "an unknown setting": (
        ["evaluate", "tiny", "--suite", "calculator", "--set", "limits.max_turn=3"],
        "an evaluation has no setting `limits.max_turn`; did you mean `limits.max_turns`?",
    ),
    "an unknown option of the tasks": (
        ["evaluate", "tiny", "--suite", "calculator", "--set", "environment.options.max_operation=3"],
        "max_operation",
    ),
    "no room for a prompt": (
        ["evaluate", "tiny", "--suite", "calculator", "--set", "limits.max_context_tokens=64"],
        "limits.max_context_tokens must exceed limits.max_action_tokens",
    ),
    "a folder that is no model": (["evaluate", ".", "--suite", "calculator"], "model.path has no config.json"),
    "a checkpoint of no run": (
        ["evaluate", "tiny", "--suite", "calculator", "--checkpoint", "3"],
        "--checkpoint is for runs only",
    ),
    "a file of predictions that the harness would not read": (
        ["evaluate", "tiny", "--suite", "calculator", "--predictions", "p.txt"],
        "must end in .jsonl",
    ),
    "an evaluation that is to train": (
        ["train", "tiny", "--set", "evaluation.alone=true"],
        "start it with `sao evaluate`",
    ),
    "a suite and a resume": (["evaluate", "--resume", "r", "--suite", "calculator"], "--resume goes on with an"),
    "an unknown run to resume": (["evaluate", "--resume", "nobody"], "there is no run nobody"),
    "an unknown evaluation to compare": (["compare", "nobody", "nobody"], "there is no run nobody"),
    "an unknown evaluation to predict from": (["predictions", "nobody", "p.jsonl"], "there is no run nobody"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, sao: Callable[..., Said], tmp_path: Path) -> None:
    arguments, expected = BAD[case]
    said = sao(*arguments)
    assert said.code == 2, said
    assert expected in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert not (tmp_path / ".sao" / "objects").exists()


def test_suites_are_listed(sao: Callable[..., Said]) -> None:
    listed = json.loads(sao("suites", "--json").out)
    assert {"calculator", "aime", "code-repair"} <= {suite["suite"] for suite in listed}
    assert "calculator" in sao("suites").out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Home:
    return Home(tmp_path_factory.mktemp("evaluated"), {"PREFECT_API_URL": prefect_api})


@pytest.fixture(scope="module")
def evaluated(home: Home) -> Any:
    """What `sao evaluate tiny` prints."""
    return home.json("evaluate", "tiny", "--suite", "calculator", *FEW)


@pytest.mark.long
def test_an_evaluation_prints_of_what_it_is_how_it_was_made_and_the_figures(evaluated: Any) -> None:
    settings, metrics = evaluated["settings"], evaluated["metrics"]
    assert (evaluated["suite"], settings["target"], settings["environment"]) == ("calculator", "tiny", "calculator")
    assert (settings["prompts"], settings["samples_per_prompt"], settings["seed"]) == (3, 2, 0)
    assert (settings["temperature"], settings["top_p"], settings["environment_version"]) == (1.0, 1.0, "1")
    assert settings["policy_sha256"] == evaluated["policy_sha256"]
    assert settings["code"]["version"]
    assert {"reward_mean", "avg_at_2", "pass_at_1", "pass_at_2", "truncated", "tokens", "turns", "rollout_s"} <= set(
        metrics
    )
    assert metrics["missing_rollouts"] == 0
    low, high = evaluated["intervals"]["reward_mean"]
    assert low <= metrics["reward_mean"] <= high


@pytest.mark.long
def test_an_evaluation_is_a_run_whose_answers_are_trajectories(home: Home, evaluated: Any) -> None:
    ledger = home.ledger()
    run = run_summary(ledger, home.settings, ledger.run(evaluated["run_id"]))
    assert (run["kind"], run["status"], run["suite"]) == ("evaluation", "completed", "calculator")
    rows = ledger.trajectories(evaluated["run_id"])
    assert len(rows) == 6
    shown = trajectory_view(ledger, home.settings, rows[0].trajectory_id)
    assert (shown["purpose"], shown["sampling"]["temperature"]) == ("evaluate", 1.0)


@pytest.mark.long
def test_an_evaluation_is_in_mlflow_with_its_weights_and_its_target(home: Home, evaluated: Any) -> None:
    found = MlflowClient(home.settings.tracking_uri).get_run(home.ledger().run(evaluated["run_id"]).mlflow_run_id)
    tags = {name: found.data.tags[name] for name in ("policy_sha256", "target", "suite", "samples_per_prompt")}
    assert tags == {
        "policy_sha256": evaluated["policy_sha256"],
        "target": "tiny",
        "suite": "calculator",
        "samples_per_prompt": "2",
    }
    assert found.data.metrics["eval/calculator/reward_mean"] == evaluated["metrics"]["reward_mean"]


@pytest.mark.long
def test_the_same_weights_prompts_and_seed_give_the_same_answers(home: Home, evaluated: Any) -> None:
    again = home.json("evaluate", "tiny", "--suite", "calculator", *FEW)
    ledger = home.ledger()
    first, second = (
        [(row.prompt_key, row.sha256) for row in ledger.trajectories(run)]
        for run in (evaluated["run_id"], again["run_id"])
    )
    assert first == second
    assert len(first) == 6
    compared = home.json("compare", evaluated["run_id"], again["run_id"])
    assert (compared["difference"], compared["p_value"], compared["prompts"]) == (0.0, 1.0, 3)


@pytest.mark.long
def test_a_model_against_another_runs_what_is_missing_and_compares(home: Home, evaluated: Any) -> None:
    target = evaluated["run_id"]
    arguments = ("evaluate", target, "--suite", "calculator", *FEW, "--against", target)
    first = home.json(*arguments)
    assert first["first"]["policy_sha256"] == first["second"]["policy_sha256"] == evaluated["policy_sha256"]
    assert first["comparison"]["p_value"] == 1.0
    before = len(home.json("runs"))
    again = home.json(*arguments)
    assert [again[side]["run_id"] for side in ("first", "second")] == [first[s]["run_id"] for s in ("first", "second")]
    assert len(home.json("runs")) == before, "nothing was missing"


@pytest.mark.long
def test_an_evaluation_that_was_killed_is_gone_on_with(home: Home) -> None:
    process = home.start("evaluate", "tiny", "--suite", "calculator", "--prompts", "400", "--samples", "2")
    database = home.settings.database_url.removeprefix("sqlite:///")
    run_id = _wait_for_a_rollout(home, database, process)
    process.kill()
    process.communicate()
    result = home.json("evaluate", "--resume", run_id)
    assert (result["run_id"], result["settings"]["prompts"], result["metrics"]["missing_rollouts"]) == (run_id, 400, 0)
    refused = home.sao("train", "--resume", run_id)
    assert refused.returncode == 2
    assert "sao evaluate --resume" in refused.stderr


def _wait_for_a_rollout(home: Home, database: str, process: Any) -> str:
    known, deadline = {run.run_id for run in home.ledger().runs()}, time.monotonic() + 200
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        with closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("SELECT DISTINCT run_id FROM trajectories").fetchall()
        new = {run_id for (run_id,) in rows} - known | ({rows[0][0]} if not known and rows else set())
        if new:
            return new.pop()
        time.sleep(0.05)
    raise AssertionError("no rollout in time")


def test_keys_of_judges_that_cannot_be_read_end_it_before_it_starts(
    sao: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAO_CHAT_API_KEYS", "sk-hush")
    said = sao("evaluate", "tiny", "--suite", "calculator")
    assert said.code == 2
    assert said.err.startswith("error: SAO_CHAT_API_KEYS must be a JSON object")
    assert "hush" not in said.err
