"""What is shown of an evaluation: every figure with its interval, how it was made, and a comparison in words."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from flows.evaluation_view import evaluation_json, how, print_comparison, print_evaluation, verdict
from infra.evaluation_comparison import EvaluationComparison, Side
from infra.ledger import EvaluationRecord
from sao_core.statistics import Interval, PairedTest, paired_test

SETTINGS: dict[str, Any] = {
    "target": "run:tiny-1@4",
    "environment": "calculator",
    "environment_version": "1",
    "seed": 3,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "greedy": True,
    "prompts": 8,
    "samples_per_prompt": 2,
    "code": {"version": "0.1.0", "commit": "0123456789abcdef", "dirty": "true"},
}
METRICS = {
    "reward_mean": 0.5,
    "reward_mean_low": 0.25,
    "reward_mean_high": 0.75,
    "pass_at_1": 0.5,
    "pass_at_2": 0.625,
    "pass_at_10": 0.75,
    "difficulty_[b]/reward_mean": 0.125,
    "truncated": 0.25,
    "missing_rollouts": 1.0,
}


def record(settings: dict[str, Any] = SETTINGS) -> EvaluationRecord:
    metrics = {f"eval/sums [/]/{name}": value for name, value in METRICS.items()}
    return EvaluationRecord(1, 0, 0, "sums [/]", metrics, "ab" * 32, 0.0, settings)


def shown(print_it: Any, *arguments: Any) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    print_it(*arguments, console)
    return console.export_text()


def test_figures_stand_with_their_intervals_whatever_the_names_hold() -> None:
    text = shown(print_evaluation, "e", record())
    lines = [" ".join(line.strip("│┃ ").split()) for line in text.splitlines()]
    assert "sums [/]: run:tiny-1@4" in text
    assert "reward (avg@2) │ 0.500 │ 0.250 … 0.750" in lines
    assert [line.split(" │ ")[0] for line in lines if line.startswith("pass")] == ["pass@1", "pass@2", "pass@10"]
    assert "reward, difficulty [b] │ 0.125" in lines
    assert "truncated │ 25.0%" in lines
    assert "missing rollouts │ 1" in lines


def test_how_it_was_made_is_said() -> None:
    assert how(record()).splitlines() == [
        "8 prompts × 2 samples and greedy · temperature 0.7, top-p 0.95, top-k off, seed 3",
        f"calculator version 1 · weights sha256 {'ab' * 32} · sao-pipeline 0.1.0 (0123456789, changed)",
    ]
    assert "recorded no settings" in how(record({}))


def test_json_has_figures_and_intervals_apart() -> None:
    value = json.loads(json.dumps(evaluation_json("e", record())))
    assert value["metrics"]["reward_mean"] == 0.5
    assert value["intervals"] == {"reward_mean": [0.25, 0.75]}
    assert not [name for name in value["metrics"] if name.endswith(("_low", "_high"))]
    assert value["settings"]["temperature"] == 0.7


def comparison(test: PairedTest, missing: int = 0) -> EvaluationComparison:
    first = Side("e[1]", "tiny", "ab" * 32, 0.75, Interval(0.5, 1.0), missing)
    return EvaluationComparison("sums", first, Side("e2", "other", "cd" * 32, 0.0, None, 0), test)


def test_a_comparison_is_told_in_words() -> None:
    test = paired_test([1.0, 1.0, 1.0, 0.0], [0.0] * 4)
    said = verdict(comparison(test, missing=1))
    assert said.splitlines() == [
        "A − B = +0.750 (95 %: +0.250 … +1.000), p = 0.25 "
        "(two-sided paired permutation test over 4 prompts, all sign flips)",
        "left out, for want of an answer: 1 prompt in A",
    ]
    assert "e[1]" in shown(print_comparison, comparison(test))


def test_a_comparison_on_one_prompt_has_no_interval_and_one_on_many_says_that_it_samples() -> None:
    assert "(95 %" not in verdict(comparison(paired_test([1.0], [0.0])))
    assert "sampled sign flips" in verdict(comparison(paired_test([1.0] * 30, [0.0] * 30)))
