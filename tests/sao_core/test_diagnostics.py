import math

import pytest
import torch
from math_vectors import VECTORS

from sao_core.diagnostics import (
    behavior_kl,
    effective_sample_size,
    explained_variance,
    ratio_mean,
    staleness,
    used_by_length,
)

LOGPROBS = torch.log(torch.tensor([[0.5, 0.9, 0.25]]))
BEHAVIOR = torch.log(torch.tensor([[0.25, 0.1, 0.5]]))
MASK = torch.tensor([[True, False, True]])


def test_explained_variance_reproduces_the_vectors() -> None:
    for returns, values, expected in VECTORS["explained_variance"]:
        actual = explained_variance(torch.tensor(returns, dtype=torch.float64), torch.tensor(values))
        assert actual == (None if expected is None else pytest.approx(expected, abs=1e-7))


def test_explained_variance_of_one_sample_or_one_label_is_none() -> None:
    assert explained_variance(torch.tensor([1.0]), torch.tensor([0.5])) is None
    assert explained_variance(torch.tensor([]), torch.tensor([])) is None
    assert explained_variance(torch.tensor([0.1] * 3), torch.tensor([0.5, 0.1, 0.2])) is None
    assert explained_variance(torch.tensor([1.0, 1.0 + 1e-7]), torch.tensor([0.5, 0.1])) is None
    assert explained_variance(torch.zeros(4), torch.randn(4)) is None


def test_explained_variance_tells_perfect_constant_and_opposite_values_apart() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns + 3) == 1.0
    assert explained_variance(returns, torch.full((4,), 0.7)) == 0.0
    assert explained_variance(returns, 1 - returns) == -3.0


def test_explained_variance_does_not_hide_a_value_that_is_not_finite() -> None:
    figure = explained_variance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, math.nan]))
    assert figure is not None
    assert math.isnan(figure)
    with pytest.raises(ValueError, match=r"one shape: got \(2,\) and \(3,\)"):
        explained_variance(torch.zeros(2), torch.zeros(3))


def test_ratio_figures_by_hand() -> None:
    # ratios 2 and 0.5 on the two action tokens
    assert ratio_mean(LOGPROBS, BEHAVIOR, MASK) == pytest.approx(1.25)
    assert effective_sample_size(LOGPROBS, BEHAVIOR, MASK) == pytest.approx(2.5**2 / (2 * 4.25))
    expected = ((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2
    assert behavior_kl(LOGPROBS, BEHAVIOR, MASK) == pytest.approx(expected)


def test_on_policy_tokens_have_ratio_one_full_sample_size_and_no_kl() -> None:
    assert ratio_mean(LOGPROBS, LOGPROBS, MASK) == pytest.approx(1)
    assert effective_sample_size(LOGPROBS, LOGPROBS, MASK) == pytest.approx(1)
    assert behavior_kl(LOGPROBS, LOGPROBS, MASK) == 0


def test_ratio_figures_survive_log_ratios_that_overflow() -> None:
    logprobs, behavior = torch.tensor([[5000.0, -1.0]]), torch.tensor([[0.0, -1.0]])
    mask = torch.ones(1, 2)
    assert effective_sample_size(logprobs, behavior, mask) == pytest.approx(0.5)
    assert ratio_mean(logprobs, behavior, mask) == math.inf


def test_ratio_figures_leave_out_what_is_not_finite_and_are_nan_without_anything() -> None:
    logprobs = torch.tensor([[math.nan, math.inf, -1.0]])
    figures = (ratio_mean, effective_sample_size, behavior_kl)
    everywhere, nowhere = torch.ones(1, 3), torch.zeros(1, 3)
    assert [figure(logprobs, torch.full((1, 3), -1.0), everywhere) for figure in figures] == pytest.approx([1, 1, 0])
    assert all(math.isnan(figure(logprobs, logprobs, nowhere)) for figure in figures)


def test_staleness_splits_age_into_queue_and_generation() -> None:
    # first rollout: sampled at ages 3, 2, 1; second, all at 2; third has no action token
    ages = torch.tensor([[3, 2, 99, 1], [2, 2, 2, 99], [99, 99, 99, 99]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    assert staleness(ages, mask) == {"queue": 1.5, "generation": 1.0, "mean": 2.0, "max": 3.0}
    assert staleness(ages, torch.zeros_like(mask)) == {}


def test_use_by_length_shows_that_the_long_ones_are_lost() -> None:
    lengths = [50, 10, 40, 20, 30]
    assert used_by_length(lengths, [length < 45 for length in lengths], parts=5) == (1.0, 1.0, 1.0, 1.0, 0.0)
    assert used_by_length(lengths, [length < 45 for length in lengths], parts=2) == (1.0, pytest.approx(2 / 3))
    assert used_by_length([7], [True], parts=2) == (None, 1.0)
    with pytest.raises(ValueError, match="for each of 2 lengths: got 1"):
        used_by_length([1, 2], [True])
