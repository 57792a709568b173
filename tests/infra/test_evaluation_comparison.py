"""Two models on the same prompts: compared prompt by prompt, refused where they were asked otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluated_runs import Answer, Bench, config

from infra.evaluation_comparison import EvaluationComparison, compare, find_evaluation
from infra.ledger import UnknownRun
from sao_core.config import ConfigError, parse_config
from sao_core.statistics import Interval


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Bench:
    return Bench(tmp_path / "bench", migrated_sqlite)


def compared(bench: Bench, first: Answer, second: Answer) -> EvaluationComparison:
    return compare(bench.ledger, bench.evaluate("a", first), bench.evaluate("b", second))


def test_the_difference_is_taken_prompt_by_prompt(bench: Bench) -> None:
    better = {"evaluation/0": 1.0, "evaluation/1": 1.0, "evaluation/2": 1.0, "evaluation/3": 0.0}
    found = compared(bench, lambda key, sample: better[key], lambda key, sample: 0.0)
    assert found.test.difference == 0.75
    assert found.test.p_value == 2 / 8, "three prompts differ: all signs, one way or the other"
    assert (found.test.prompts, found.test.exact) == (4, True)
    assert found.test.interval == Interval(0.25, 1.0)  # of 256 resamples: 1/256 is 0, 13/256 at most 1/4, 81/256 is 1
    assert (found.first.mean, found.second.mean) == (0.75, 0.0)
    assert (found.first.missing, found.second.missing) == (0, 0)


def test_samples_of_a_prompt_are_averaged_first(bench: Bench) -> None:
    found = compared(bench, lambda key, sample: float(sample == 0), lambda key, sample: float(sample == 1))
    assert (found.test.difference, found.test.p_value) == (0.0, 1.0)


def test_a_prompt_that_one_could_not_answer_is_left_out_and_counted(bench: Bench) -> None:
    found = compared(
        bench,
        lambda key, sample: None if key == "evaluation/0" else 1.0,
        lambda key, sample: float(key == "evaluation/0"),
    )
    assert found.test.prompts == 3
    assert (found.first.missing, found.second.missing) == (1, 0)
    assert (found.first.mean, found.second.mean) == (1.0, 0.0)
    assert found.as_dict()["first"]["missing_prompts"] == 1


def test_fewer_prompts_of_the_same_tasks_are_compared_on_what_both_have(bench: Bench) -> None:
    few = bench.evaluate("few", lambda key, sample: 1.0, config(prompts=2))
    many = bench.evaluate("many", lambda key, sample: 0.0, config(prompts=5))
    found = compare(bench.ledger, few, many)
    assert (found.test.prompts, found.first.missing, found.second.missing) == (2, 3, 0)


def other(**sections: Any) -> Any:
    return parse_config({**config().model_dump(mode="json"), **sections})


@pytest.mark.parametrize(
    ("settings", "version", "named"),
    [
        (config(temperature=0.5), "1", "temperature 1.0 against 0.5"),
        (config(top_p=0.9), "1", "top_p 1.0 against 0.9"),
        (config(samples_per_prompt=3), "1", "samples_per_prompt 2 against 3"),
        (config(suite="other"), "1", "suite calculator against other"),
        (config(), "2", "environment_version 1 against 2"),
        (other(seed=1), "1", "seed 0 against 1"),
        (other(rollout={"max_turns": 3}), "1", "limits"),
        (other(environment={"options": {"max_operations": 2}}), "1", "environment_options"),
    ],
    ids=["temperature", "top-p", "samples", "suite", "version", "seed", "limits", "options"],
)
def test_what_was_asked_otherwise_is_refused_by_name(bench: Bench, settings: Any, version: str, named: str) -> None:
    first = bench.evaluate("a", lambda key, sample: 1.0)
    second = bench.evaluate("b", lambda key, sample: 1.0, settings, version)
    with pytest.raises(ConfigError, match="a and b cannot be compared") as refused:
        compare(bench.ledger, first, second)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_result_without_recorded_settings_is_refused(bench: Bench) -> None:
    first = bench.evaluate("a", lambda key, sample: 1.0)
    bench.ask("old", config())
    bench.answer("old", lambda key, sample: 1.0)
    bench.ledger.add_evaluation("old", 0, 0, "calculator", {}, "ab" * 32)
    with pytest.raises(ConfigError, match="old was made by an earlier version"):
        compare(bench.ledger, first, find_evaluation(bench.ledger, "old"))


def test_nothing_in_common_is_said(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="no prompt in common"):
        compared(bench, lambda key, sample: None, lambda key, sample: 1.0)


def test_an_evaluation_is_found_by_run_and_step(bench: Bench) -> None:
    found = bench.evaluate("run@home", lambda key, sample: 1.0)
    assert find_evaluation(bench.ledger, "run@home").record == found.record
    assert find_evaluation(bench.ledger, "run@home@0").record == found.record
    with pytest.raises(ConfigError, match=r"run@home has no evaluation of step 7; there are those of steps 0"):
        find_evaluation(bench.ledger, "run@home@7")
    bench.ask("asked", config())
    with pytest.raises(ConfigError, match="asked has no evaluation; it has none yet"):
        find_evaluation(bench.ledger, "asked")
    with pytest.raises(UnknownRun):
        find_evaluation(bench.ledger, "nobody")
