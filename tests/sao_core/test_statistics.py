"""Every figure here is worked out by hand, or by a second and slower formulation."""

from __future__ import annotations

from itertools import combinations, product
from statistics import NormalDist, fmean

import numpy as np
import pytest

from sao_core.statistics import (
    FLIPS,
    Interval,
    avg_at_k,
    bootstrap_interval,
    paired_test,
    pass_at_k,
    prompt_means,
)


def test_avg_at_k_weighs_every_prompt_the_same() -> None:
    # (1 + 1/2 + 0) / 3, though 3 of 5 samples are solved
    assert avg_at_k([[1.0, 1.0], [1.0, 0.0], [0.0]]) == pytest.approx(0.5)
    assert prompt_means([[0.25, 0.75], [1.0]]).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("scores", [[], [[1.0], []]], ids=["no prompts", "a prompt without samples"])
def test_avg_at_k_of_nothing_is_refused(scores: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="needs a sample"):
        avg_at_k(scores)


@pytest.mark.parametrize(
    ("samples", "solved", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 − C(3,2)/C(4,2) = 1 − 3/6
        (4, 2, 2, 5 / 6),  # 1 − C(2,2)/C(4,2) = 1 − 1/6
        (16, 1, 8, 1 / 2),  # 1 − C(15,8)/C(16,8) = 1 − 6435/12870
        (5, 3, 3, 1.0),  # of 3 draws one must be solved, since only 2 are not
        (5, 0, 5, 0.0),
    ],
)
def test_pass_at_k_by_hand(samples: int, solved: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, solved, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_solved_one() -> None:
    for samples in range(1, 7):
        for solved in range(samples + 1):
            outcomes = [True] * solved + [False] * (samples - solved)
            for k in range(1, samples + 1):
                share = fmean(any(draw) for draw in combinations(outcomes, k))
                assert pass_at_k(samples, solved, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4, 5, 1), "solved must lie"), ((4, 1, 5), "k must lie"), ((4, 1, 0), "k must lie")],
    ids=["more solved than samples", "k over the samples", "k of 0"],
)
def test_pass_at_k_of_the_impossible_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


def test_the_interval_of_two_prompts_counts_their_four_resamples() -> None:
    # means 0, 1/2, 1/2, 1 with shares 1/4, 1/2, 1/4
    assert bootstrap_interval([0.0, 1.0]) == Interval(0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == Interval(0.5, 0.5)


def test_the_interval_of_three_prompts_counts_their_27_resamples() -> None:
    # Of 0, 0, 1 the mean is j/3 with C(3,j) (1/3)^j (2/3)^(3−j): 8/27, 12/27, 6/27, 1/27; 26/27 < 0.975
    assert bootstrap_interval([0.0, 0.0, 1.0]) == Interval(0.0, 1.0)
    # 90 %: 8/27 ≥ 0.05; 20/27 < 0.95 ≤ 26/27
    assert bootstrap_interval([0.0, 0.0, 1.0], confidence=0.9) == Interval(0.0, pytest.approx(2 / 3))  # type: ignore[arg-type]


def test_the_interval_of_five_prompts_is_that_of_a_plain_enumeration() -> None:
    values = [0.1, 0.5, 0.9, 0.3, 1.0]
    means = sorted(fmean(draw) for draw in product(values, repeat=5))
    low, high = means[int(0.025 * 3125)], means[int(0.975 * 3125)]  # the 79th and the 3047th of 3125
    found = bootstrap_interval(values)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_the_interval_of_many_prompts_is_drawn_with_a_seed_and_near_the_normal_one() -> None:
    values = np.random.default_rng(1).random(400)
    found = bootstrap_interval(values, seed=3)
    assert found is not None
    assert found == bootstrap_interval(values, seed=3)
    assert found != bootstrap_interval(values, seed=4)
    half = NormalDist().inv_cdf(0.975) * values.std() / 20  # the root of 400
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    trials = generator.random((200, 60)) < 0.3
    found = [bootstrap_interval(trial.astype(float), resamples=500) for trial in trials]
    covered = fmean(i is not None and i.low <= 0.3 <= i.high for i in found)
    assert 0.89 <= covered <= 0.99


def test_one_prompt_has_no_interval() -> None:
    assert bootstrap_interval([0.7]) is None


def test_a_batch_of_resamples_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).random(50)
    whole = bootstrap_interval(values)
    monkeypatch.setattr("sao_core.statistics._CELLS", 7_000)
    assert bootstrap_interval(values) == whole


def test_the_paired_test_counts_all_sign_flips_of_few_prompts() -> None:
    # differences 1, 1, 1: of 8 assignments +++ and −−− are as far out
    test = paired_test([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    assert (test.p_value, test.exact, test.prompts) == (0.25, True, 3)
    assert test.difference == 1.0
    assert test.interval == Interval(1.0, 1.0)


def test_the_paired_test_is_two_sided_and_counts_ties() -> None:
    # differences 3, −1, 1 sum to 3; the sums are ±5, ±3, ±3, ±1: six of eight reach 3
    test = paired_test([3.0, 0.0, 1.0], [0.0, 1.0, 0.0])
    assert test.p_value == 6 / 8
    swapped = paired_test([0.0, 1.0, 0.0], [3.0, 0.0, 1.0])
    assert (swapped.difference, swapped.p_value) == (-test.difference, test.p_value)


def test_prompts_that_do_not_differ_count_for_the_mean_and_not_for_the_p_value() -> None:
    test = paired_test([1.0, 1.0, 1.0, *[0.5] * 37], [0.0, 0.0, 0.0, *[0.5] * 37])
    assert (test.p_value, test.exact, test.prompts) == (0.25, True, 40)
    assert test.difference == pytest.approx(3 / 40)


def test_models_that_agree_everywhere_have_p_1() -> None:
    test = paired_test([0.2, 0.4], [0.2, 0.4])
    assert (test.p_value, test.difference, test.interval) == (1.0, 0.0, Interval(0.0, 0.0))


def test_sums_that_differ_by_rounding_alone_are_ties() -> None:
    # 0.1 + 0.2 and 0.3 are equal to a person: all four assignments of (0.3, 0.3), and those of tenths, must tie
    test = paired_test([0.1, 0.2, 0.3], [0.0, 0.0, 0.0])
    assert test.p_value == 2 / 8
    assert paired_test([0.1, 0.2, 0.0], [0.0, 0.0, 0.3]).p_value == 1.0


def test_many_prompts_are_sampled_with_a_seed_and_agree_with_the_normal_approximation() -> None:
    generator = np.random.default_rng(5)
    first = generator.random(60)
    second = first - generator.normal(0.05, 0.2, 60)
    test = paired_test(first, second, seed=1)
    assert not test.exact
    assert test.p_value == paired_test(first, second, seed=1).p_value
    d = first - second
    z = abs(d.sum()) / np.sqrt((d * d).sum())
    assert test.p_value == pytest.approx(2 * NormalDist().cdf(-z), rel=0.15)


def test_a_sampled_p_value_is_never_0() -> None:
    assert paired_test(np.ones(200), np.zeros(200)).p_value == pytest.approx(1 / (1 + FLIPS))


def test_p_values_of_models_that_are_alike_are_spread_evenly() -> None:
    generator = np.random.default_rng(2)
    p_values = [paired_test(generator.random(9), generator.random(9)).p_value for _ in range(400)]
    assert fmean(p <= 0.05 for p in p_values) == pytest.approx(0.05, abs=0.03)
    assert fmean(p <= 0.5 for p in p_values) == pytest.approx(0.5, abs=0.08)


def test_a_paired_test_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt that both have"):
        paired_test([], [])
