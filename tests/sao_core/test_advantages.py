import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from math_vectors import VECTORS, Stacked, assert_close, batches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sao_core.advantages import (
    adaptive_lambda,
    group_relative,
    rollout_advantages,
    running_mean,
    skip_observation_gae,
    step_level_gae,
    whiten,
)
from sao_core.algorithms import PRESETS
from sao_core.config import AlgorithmConfig

NAN = math.nan
DTYPES = [torch.float64, torch.float32]


def sequential_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: npt.ArrayLike, bootstrap: npt.ArrayLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The definition, token by token from the end, in float64: δ_t = ρ_t + γ·V_next − V_t, Â_t = δ_t + γλ·Â_next."""
    keep = mask.numpy()
    rho, v = (np.where(keep, x.double().numpy(), 0.0) for x in (rewards, values))
    advantages = np.zeros(rho.shape)
    following = np.broadcast_to(np.zeros(()), rho.shape[:1])
    next_value = np.broadcast_to(np.asarray(bootstrap, dtype=np.float64), rho.shape[:1])
    for t in reversed(range(rho.shape[1])):
        delta = rho[:, t] + gamma * next_value - v[:, t]
        now = keep[:, t]
        following = np.where(now, delta + gamma * np.asarray(lam, dtype=np.float64) * following, following)
        next_value = np.where(now, v[:, t], next_value)
        advantages[:, t] = np.where(now, following, 0.0)
    return advantages, np.where(keep, advantages + v, 0.0)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


# --- skip-observation GAE -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", batches("gamma"), ids=lambda cases: f"{len(cases)}x")
def test_gae_reproduces_the_vectors_alone_and_stacked_with_nan_off_the_mask(
    cases: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    batch = Stacked(cases, dtype)
    gamma, lam, bootstrap = cases[0]["gamma"], batch.per_row("lam"), batch.per_row("bootstrap_value")
    rewards, values = batch.inputs("rewards"), batch.inputs("values")

    advantages, returns = skip_observation_gae(rewards, values, batch.mask, gamma, lam, bootstrap)
    assert advantages.dtype == returns.dtype == dtype
    assert_close(advantages, batch.expected("advantages"), dtype)
    assert_close(returns, torch.where(batch.mask, batch.expected("advantages") + batch.expected("values"), 0.0), dtype)

    _, targets = skip_observation_gae(rewards, values, batch.mask, gamma, 1.0, bootstrap)
    assert_close(targets, batch.expected("value_targets"), dtype)


def test_gae_of_two_actions_around_an_observation_by_hand() -> None:
    # δ_2 = 1 − 0.25 = 0.75; δ_0 = 0 + 0.25 − 0.5 = −0.25; Â_0 = −0.25 + 0.5·0.75 = 0.125
    advantages, returns = skip_observation_gae(
        row(0, NAN, 1), row(0.5, NAN, 0.25), torch.tensor([[True, False, True]]), 1.0, 0.5
    )
    assert advantages.tolist() == [[0.125, 0.0, 0.75]]
    assert returns.tolist() == [[0.625, 0.0, 1.0]]


def test_bootstrap_value_stands_behind_the_last_action_token_by_hand() -> None:
    # γ = 0.5: δ_1 = 0 + 0.5·4 − 1 = 1; δ_0 = 0 + 0.5·1 − 2 = −1.5; λ = 1: Â_0 = −1.5 + 0.5·1 = −1
    advantages, _ = skip_observation_gae(
        row(0, 0, NAN), row(2, 1, NAN), torch.tensor([[True, True, False]]), 0.5, 1.0, 4.0
    )
    assert advantages.tolist() == [[-1.0, 1.0, 0.0]]


def test_reward_before_a_trailing_observation_reaches_every_action_token() -> None:
    mask = torch.tensor([[False, True, True, False, True, False, False]])
    _, returns = skip_observation_gae(row(0, 0, 0, 0, 1, 0, 0), row(*[0.3] * 7), mask, 1.0, 1.0)
    torch.testing.assert_close(returns, mask.double())


def test_return_is_carried_through_each_observation() -> None:
    mask = torch.tensor([[True, False, False, True, True, False, True]])
    _, returns = skip_observation_gae(row(1, 0, 0, 0, 2, 0, 4), row(*[9.0] * 7), mask, 1.0, 1.0)
    torch.testing.assert_close(returns, row(7, 0, 0, 6, 6, 0, 4))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_observations_and_padding_anywhere_leave_the_advantages_of_actions_unchanged(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 80))
    gaps = data.draw(st.lists(st.integers(0, 40), min_size=count + 1, max_size=count + 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rewards, values = torch.randn(2, 1, count, dtype=torch.float64, generator=generator)
    places = torch.tensor([gap + 1 for gap in gaps[:-1]]).cumsum(0) - 1
    spread = torch.full((2, 1, int(places[-1]) + 1 + gaps[-1]), NAN, dtype=torch.float64)
    spread[0, :, places], spread[1, :, places] = rewards, values
    mask = torch.zeros(1, spread.shape[2], dtype=torch.bool)
    mask[:, places] = True

    together, _ = skip_observation_gae(rewards, values, torch.ones(1, count), 0.9, 0.8, 0.5)
    apart, _ = skip_observation_gae(spread[0], spread[1], mask, 0.9, 0.8, 0.5)
    torch.testing.assert_close(apart[:, places], together, rtol=1e-12, atol=1e-12)
    assert not apart[~mask].any()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_gae_agrees_with_the_sequential_definition(data: st.DataObject) -> None:
    rows, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 150))
    unit = st.sampled_from([0.0, 1e-12, 1e-3, 0.1, 0.5, 0.95, 1 - 5e-6, 1.0]) | st.floats(0, 1)
    gamma = data.draw(unit)
    lam = data.draw(st.lists(unit, min_size=rows, max_size=rows))
    bootstrap = data.draw(st.lists(st.floats(-5, 5), min_size=rows, max_size=rows))
    density = data.draw(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    rewards, values = torch.randn(2, rows, tokens, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, tokens, generator=generator) < density
    hole = torch.where(mask, 0.0, NAN)

    advantages, returns = skip_observation_gae(
        rewards + hole, values + hole, mask, gamma, torch.tensor(lam, dtype=torch.float64), torch.tensor(bootstrap)
    )
    expected, expected_returns = sequential_gae(
        rewards, values, mask, gamma, lam, torch.tensor(bootstrap).double().numpy()
    )
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(returns.numpy(), expected_returns, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1 - 5e-6])
def test_float32_stays_accurate_over_131072_tokens(lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, tokens = 4, 131072
    values = torch.randn(rows, tokens, generator=generator)
    mask = torch.rand(rows, tokens, generator=generator) < 0.5
    mask[1] = True
    mask[2] = (torch.rand(tokens, generator=generator) < 1 / 200).cumsum(0) % 2 == 0
    rewards = torch.zeros(rows, tokens)
    rewards[torch.arange(rows), tokens - 1 - mask.flip(1).int().argmax(1)] = 1.0

    advantages, _ = skip_observation_gae(rewards, values, mask, 1.0, lam, 0.25)
    expected, _ = sequential_gae(rewards, values, mask, 1.0, lam, 0.25)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=3e-6)


def test_blocks_of_rows_give_what_each_row_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 7, 100, dtype=torch.float64, generator=generator)
    mask = torch.rand(7, 100, generator=generator) < 0.6
    lam, bootstrap = torch.rand(7, generator=generator), torch.randn(7, generator=generator)
    monkeypatch.setattr("sao_core.advantages.CPU_BLOCK_TOKENS", 300)
    advantages, _ = skip_observation_gae(rewards, values, mask, 0.9, lam, bootstrap)
    expected, _ = sequential_gae(rewards, values, mask, 0.9, lam.double().numpy(), bootstrap.double().numpy())
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_a_row_without_action_tokens_gets_zeros() -> None:
    advantages, returns = skip_observation_gae(row(NAN, NAN), row(NAN, NAN), torch.zeros(1, 2), 1.0, 0.5, 3.0)
    assert advantages.tolist() == returns.tolist() == [[0.0, 0.0]]


def test_lambda_given_as_a_number_is_not_rounded_to_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(1, 20_000, dtype=torch.float64, generator=generator)
    arguments = torch.zeros_like(values), values, torch.ones_like(values), 1.0
    number, _ = skip_observation_gae(*arguments, 1 - 5e-6)
    tensor, _ = skip_observation_gae(*arguments, torch.tensor([1 - 5e-6], dtype=torch.float64))
    assert torch.equal(number, tensor)


def test_a_global_setting_of_reduced_matmul_precision_does_not_reach_advantages() -> None:
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 3, 500, generator=generator)
    mask = torch.rand(3, 500, generator=generator) < 0.5
    expected, _ = sequential_gae(rewards, values, mask, 1.0, 0.97, 0.0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        advantages, _ = skip_observation_gae(rewards, values, mask, 1.0, 0.97)
    finally:
        torch.set_float32_matmul_precision(before)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-5)


def test_half_precision_is_worked_out_in_float32() -> None:
    values = torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)
    advantages, returns = skip_observation_gae(torch.tensor([[0, 1]]), values, torch.ones(1, 2), 1.0, 0.5)
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages.tolist() == [[0.125, 0.75]]


class CountedOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_number_of_operations_does_not_grow_with_the_number_of_tokens() -> None:
    counts = []
    for tokens in (1100, 30_000):  # as many levels of blocks in both
        with CountedOperations() as operations:
            skip_observation_gae(torch.zeros(1, tokens), torch.zeros(1, tokens), torch.ones(1, tokens), 1.0, 0.95)
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


def test_advantages_carry_no_gradient_into_the_critic() -> None:
    values = torch.zeros(1, 3, requires_grad=True)
    advantages, returns = skip_observation_gae(torch.ones(1, 3), values, torch.ones(1, 3), 1.0, 0.9)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.2}, r"gamma must be in \[0, 1\]: got 1.2"),
        ({"lam": -0.5}, r"lam must be in \[0, 1\]: got -0.5"),
        ({"lam": NAN}, r"lam must be in \[0, 1\]: got nan"),
        ({"lam": torch.zeros(3)}, r"lam must be a number or of shape \(2,\): got \(3,\)"),
        ({"bootstrap_value": torch.zeros(2, 1)}, r"bootstrap_value must be a number or of shape \(2,\): got \(2, 1\)"),
        ({"rewards": torch.zeros(2, 5)}, r"must share one shape \(B, T\): got rewards \(2, 5\), values \(2, 4\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "rewards": torch.zeros(2, 4),
        "values": torch.zeros(2, 4),
        "action_mask": torch.ones(2, 4),
        "gamma": 1.0,
        "lam": 0.5,
    }
    with pytest.raises(ValueError, match=message):
        skip_observation_gae(**(arguments | change))


# --- λ ------------------------------------------------------------------------------------------


def test_adaptive_lambda_reproduces_the_vectors() -> None:
    lengths = [length for length, _ in VECTORS["adaptive_lambda"]]
    expected = [lam for _, lam in VECTORS["adaptive_lambda"]]
    assert [adaptive_lambda(length) for length in lengths] == pytest.approx(expected, abs=1e-15)
    assert adaptive_lambda(torch.tensor(lengths)).tolist() == pytest.approx(expected, abs=1e-15)


def test_lambda_at_131072_tokens_keeps_the_digits_of_its_distance_from_one() -> None:
    for count in (torch.tensor([131072]), torch.tensor([131072.0]), torch.tensor([131072], dtype=torch.int32)):
        lam = adaptive_lambda(count)
        assert lam.dtype == torch.float64
        assert float(1 - lam) == pytest.approx(1 / (1.5 * 131072), rel=1e-9)


def test_lambda_keeps_the_shape_of_its_argument_and_is_never_negative() -> None:
    assert adaptive_lambda(torch.tensor([[1, 2], [0, 1]]), alpha=0.75).tolist() == [[0.0, pytest.approx(1 / 3)], [0, 0]]
    with pytest.raises(ValueError, match="alpha must be above 0: got 0"):
        adaptive_lambda(3, alpha=0)


# --- step level ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_of", ["mean", "last"])
@pytest.mark.parametrize("cases", batches("gamma"), ids=lambda cases: f"{len(cases)}x")
def test_step_level_gae_reproduces_the_vectors(cases: list[dict[str, Any]], value_of: Any, dtype: torch.dtype) -> None:
    batch = Stacked(cases, dtype)
    advantages = step_level_gae(
        batch.inputs("rewards"), batch.inputs("values"), batch.mask, cases[0]["gamma"], 1.5, value_of
    )
    assert_close(advantages, batch.expected(f"step_level_{value_of}"), dtype)


def test_step_level_gae_of_two_actions_by_hand() -> None:
    mask = torch.tensor([[True, True, False, True, False]])
    rewards, values = row(1, 0, NAN, 2, NAN), row(0, 1, NAN, 0.75, NAN)
    # two actions, λ = 1 − 1/(1.5·2) = 2/3; last: δ_1 = 2 − 0.75 = 1.25; δ_0 = 1 + 0.75 − 1 = 0.75
    last = step_level_gae(rewards, values, mask, 1.0, 1.5, "last")
    torch.testing.assert_close(last, row(0.75 + 2 / 3 * 1.25, 0.75 + 2 / 3 * 1.25, 0, 1.25, 0))
    # mean: δ_0 = 1 + 0.75 − 0.5 = 1.25; a value of 1.5 behind the end: δ_1 = 2 + 1.5 − 0.75 = 2.75
    mean = step_level_gae(rewards, values, mask, 1.0, 1.5, "mean", 1.5)
    torch.testing.assert_close(mean, row(1.25 + 2 / 3 * 2.75, 1.25 + 2 / 3 * 2.75, 0, 2.75, 0))


def test_step_level_gae_refuses_an_unknown_value() -> None:
    with pytest.raises(ValueError, match="value_of must be `mean` or `last`: got 'first'"):
        step_level_gae(row(1), row(1), torch.ones(1, 1), 1.0, 1.5, "first")  # type: ignore[arg-type]


# --- groups, running means, whitening -----------------------------------------------------------


def test_group_relative_reproduces_the_vectors() -> None:
    for scores, expected in VECTORS["group_advantage"]:
        assert_close(group_relative(torch.tensor(scores, dtype=torch.float64)), torch.tensor(expected), torch.float32)
        double = group_relative(torch.tensor(scores, dtype=torch.float64))
        assert double.tolist() == pytest.approx(expected, abs=1e-10)


def test_running_means_reproduce_the_vectors() -> None:
    history: list[tuple[str, float]] = [(key, score) for key, score in VECTORS["running_mean"]["history"]]
    per_prompt = [
        running_mean(score, [s for k, s in history[:i] if k == key], 8) for i, (key, score) in enumerate(history)
    ]
    overall = [running_mean(score, [s for _, s in history[:i]], 16) for i, (_, score) in enumerate(history)]
    assert per_prompt == pytest.approx(VECTORS["running_mean"]["per_prompt_window_8"], abs=1e-10)
    assert overall == pytest.approx(VECTORS["running_mean"]["global_window_16"], abs=1e-10)


def test_running_mean_is_zero_without_history_and_forgets_beyond_its_window() -> None:
    assert running_mean(0.5, [], 8) == 0.5
    assert running_mean(1.0, [100.0, 0.0, 1.0], 2) == 0.5
    with pytest.raises(ValueError, match="window must be at least 1: got 0"):
        running_mean(1.0, [1.0], 0)


def test_whitening_counts_action_tokens_only() -> None:
    mask = torch.tensor([[True, False], [True, False]])
    whitened = whiten(torch.tensor([[3.0, NAN], [1.0, 50.0]]), mask)
    torch.testing.assert_close(whitened, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert whiten(torch.full((1, 2), NAN), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


# --- by algorithm -------------------------------------------------------------------------------

MASK = torch.tensor([[True, False, True], [True, True, False], [True, False, False], [True, True, True]])
REWARDS = torch.tensor([[0, NAN, 1.0], [0, 0, NAN], [1, NAN, NAN], [0, 0, 0]])
VALUES = torch.tensor([[0.5, NAN, 0.25], [0.1, 0.2, NAN], [0.5, NAN, NAN], [0.3, 0.2, 0.1]])


def test_token_level_presets_use_the_lambda_of_each_rollouts_own_length() -> None:
    advantages = rollout_advantages(PRESETS["sao"], AlgorithmConfig(), REWARDS, VALUES, MASK)
    lam = [2 / 3, 2 / 3, 1 / 3, 7 / 9]
    expected, _ = sequential_gae(REWARDS, VALUES, MASK, 1.0, lam, 0.0)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-6)


def test_step_level_presets_differ_in_the_value_of_an_action() -> None:
    mean = rollout_advantages(PRESETS["sao-step-mean"], AlgorithmConfig(), REWARDS, VALUES, MASK)
    last = rollout_advantages(PRESETS["sao-step-last"], AlgorithmConfig(), REWARDS, VALUES, MASK)
    torch.testing.assert_close(mean[3], torch.tensor([-0.2, -0.2, -0.2]))
    torch.testing.assert_close(last[3], torch.tensor([-0.1, -0.1, -0.1]))


def test_group_relative_presets_compare_within_the_group() -> None:
    advantages = rollout_advantages(PRESETS["grpo"], AlgorithmConfig(), REWARDS, None, MASK, groups=[7, 3, 3, 7])
    expected = torch.tensor([[1.0, 0, 1], [-1, -1, 0], [1, 0, 0], [-1, -1, -1]])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)


def test_running_mean_presets_subtract_the_earlier_scores_of_each_rollout() -> None:
    baselines = [[0.0, 0.5], [1.0], [], [0.25] * 20]
    advantages = rollout_advantages(
        PRESETS["running-mean"], AlgorithmConfig(), REWARDS, None, MASK, 0.0, None, baselines
    )
    expected = torch.tensor([[0.75, 0, 0.75], [-1, -1, 0], [1, 0, 0], [-0.25, -0.25, -0.25]])
    torch.testing.assert_close(advantages, expected)


def test_whitening_is_applied_where_it_is_asked_for() -> None:
    settings_ = AlgorithmConfig(whiten_advantages=True)
    advantages = rollout_advantages(PRESETS["sao"], settings_, REWARDS, VALUES, MASK)
    assert float(advantages[MASK].mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages[MASK].std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert not advantages[~MASK].any()


def test_what_an_advantage_needs_and_does_not_get_is_named() -> None:
    with pytest.raises(ValueError, match="values must be given for the advantage of sao"):
        rollout_advantages(PRESETS["sao"], AlgorithmConfig(), REWARDS, None, MASK)
    with pytest.raises(ValueError, match="groups must name the group of each of 4 rollouts for grpo: got None"):
        rollout_advantages(PRESETS["grpo"], AlgorithmConfig(), REWARDS, None, MASK)
    with pytest.raises(ValueError, match="baselines must give the earlier scores of each of 4 rollouts"):
        rollout_advantages(PRESETS["running-mean"], AlgorithmConfig(), REWARDS, None, MASK, baselines=[[]])
