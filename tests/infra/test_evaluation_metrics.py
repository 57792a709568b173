"""The figures of an evaluation, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from infra_fixtures import row

from infra.evaluation_metrics import evaluated_rollouts, evaluation_metrics, interval_of
from infra.ledger import TrajectoryRow
from sao_core.protocols import RolloutRequest
from sao_core.statistics import Interval
from sao_core.trajectory import Outcome, Purpose


def rollout(number: int, prompt: str, score: float, **more: Any) -> TrajectoryRow:
    request = RolloutRequest("run", number, 1, Purpose.EVALUATE, prompt, policy_version=0)
    return replace(row(request), score=score, difficulty="", **more)


def metrics(*rows: TrajectoryRow) -> dict[str, float]:
    found = evaluation_metrics("sums", rows)
    assert all(name.startswith("eval/sums/") for name in found)
    return {name.removeprefix("eval/sums/"): value for name, value in found.items()}


FOUR_SAMPLES = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0], "c": [0.0, 0.5, 0.0, 0.0]}
ROWS = [
    rollout(sample * 3 + place, prompt, scores[sample])
    for place, (prompt, scores) in enumerate(FOUR_SAMPLES.items())
    for sample in range(4)
]


def test_avg_at_k_and_pass_at_k_of_four_samples_by_hand() -> None:
    found = metrics(*ROWS)
    assert found["avg_at_4"] == found["reward_mean"] == pytest.approx((1 / 4 + 2 / 4 + 1 / 8) / 3)
    assert found["pass_at_1"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)  # half a reward solves nothing
    assert found["pass_at_2"] == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert found["pass_at_4"] == pytest.approx(2 / 3)
    assert {name for name in found if name.startswith("pass_at_") and name[-1].isdigit()} == {
        "pass_at_1",
        "pass_at_2",
        "pass_at_4",
    }


def test_intervals_are_those_of_all_27_resamples_of_three_prompts() -> None:
    found = metrics(*ROWS)
    # The smallest mean (c, c, c) has probability 1/27 > 2.5 %, and so has the largest (b, b, b).
    assert interval_of(found, "reward_mean") == Interval(0.125, 0.5)
    assert interval_of(found, "pass_at_2") == Interval(0.0, pytest.approx(5 / 6))  # type: ignore[arg-type]
    assert interval_of(found, "truncated") is None


def test_all_samples_are_a_k_of_their_own() -> None:
    found = metrics(*(rollout(number, "a", float(number == 0)) for number in range(3)))
    assert [found[f"pass_at_{k}"] for k in (1, 2, 3)] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert "avg_at_3" in found
    assert "reward_mean_low" not in found, "one prompt has no interval"


def test_a_prompt_weighs_the_same_whatever_is_missing_of_it() -> None:
    found = metrics(rollout(0, "a", 1.0), rollout(1, "a", 1.0), rollout(2, "a", 1.0), rollout(3, "b", 0.0))
    assert found["reward_mean"] == 0.5
    assert "pass_at_2" not in found, "b has one sample only"


def test_greedy_answers_have_their_own_mean_and_stay_out_of_the_rest() -> None:
    found = metrics(rollout(0, "a", 0.0), rollout(1, "a", 1.0, greedy=True, num_action_tokens=999))
    assert (found["reward_mean"], found["greedy_reward_mean"], found["pass_at_1"]) == (0.0, 1.0, 0.0)
    assert found["tokens"] != 999


def test_difficulties_have_means_and_intervals_of_their_own() -> None:
    easy = [replace(rollout(number, f"easy-{number}", 1.0), difficulty="1") for number in range(2)]
    hard = replace(rollout(7, "hard", 0.0), difficulty="2")
    found = metrics(*easy, hard)
    assert (found["difficulty_1/reward_mean"], found["difficulty_2/reward_mean"]) == (1.0, 0.0)
    assert interval_of(found, "difficulty_1/reward_mean") == Interval(1.0, 1.0)
    assert "difficulty_2/reward_mean_low" not in found


def test_costs_are_means_over_rollouts_and_sums_over_segments() -> None:
    first = rollout(0, "a", 1.0, num_segments=2, num_action_tokens=10, num_turns=2, duration_s=3.0)
    second = replace(first, segment=1, num_action_tokens=5, num_turns=1)
    other = rollout(1, "b", 0.0, num_action_tokens=25, num_turns=1, duration_s=1.0, outcome=Outcome.TRUNCATED)
    found = metrics(second, other, first)
    assert (found["tokens"], found["turns"], found["rollout_s"], found["truncated"]) == (20.0, 2.0, 2.0, 0.5)
    assert len(evaluated_rollouts([first, second, other])) == 2


def test_rows_of_an_earlier_version_have_no_seconds() -> None:
    assert "rollout_s" not in metrics(rollout(0, "a", 1.0, duration_s=None))


def test_an_evaluation_without_rollouts_has_no_figures() -> None:
    assert metrics() == {}
