import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from math_vectors import Stacked, assert_close, batches
from torch import Tensor

from sao_core.objectives import dis_keep, dis_policy_loss, entropy_bonus, kl_penalty, ppo_clip_loss, value_loss

NAN, INF = math.nan, math.inf
DTYPES = [torch.float64, torch.float32]
EPS_LOW, EPS_HIGH = 0.3, 5.0


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x)
    return grad


# --- vectors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", batches("eps_low", "eps_high"), ids=lambda cases: f"{len(cases)}x")
def test_dis_reproduces_the_vectors_alone_and_stacked_with_nan_off_the_mask(
    cases: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    batch = Stacked(cases, dtype)
    logprobs = leaf(batch.inputs("logprobs"))
    loss, statistics = dis_policy_loss(
        logprobs,
        batch.inputs("behavior_logprobs"),
        batch.inputs("advantages"),
        batch.mask,
        cases[0]["eps_low"],
        cases[0]["eps_high"],
    )
    count = batch.counts.sum().clamp(min=1)
    assert_close(loss, batch.mean("dis_loss") if len(cases) > 1 else cases[0]["dis_loss"], dtype)
    assert_close(gradient(loss, logprobs), batch.expected("dis_grad") * batch.counts[:, None] / count, dtype)
    if batch.mask.any():
        kept = batch.mean("dis_kept_fraction")
        assert float(1 - statistics["band_rejected"]) == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", batches("ppo_eps_low", "ppo_eps_high"), ids=lambda cases: f"{len(cases)}x")
def test_ppo_and_value_loss_reproduce_the_vectors(cases: list[dict[str, Any]], dtype: torch.dtype) -> None:
    batch = Stacked(cases, dtype)
    loss, _ = ppo_clip_loss(
        batch.inputs("ppo_logprobs"),
        batch.inputs("behavior_logprobs"),
        batch.inputs("advantages"),
        batch.mask,
        cases[0]["ppo_eps_low"],
        cases[0]["ppo_eps_high"],
    )
    error = value_loss(batch.inputs("values"), batch.inputs("value_targets"), batch.mask)
    if len(cases) == 1:
        assert_close(loss, cases[0]["ppo_loss"], dtype)
        assert_close(error, cases[0]["value_loss"], dtype)
    else:
        assert_close(loss, batch.mean("ppo_loss"), dtype)
        assert_close(error, batch.mean("value_loss"), dtype)


# --- DIS by hand --------------------------------------------------------------------------------


def test_dis_weight_is_the_detached_ratio_times_the_advantage() -> None:
    # r = 2, Â = 3, two action tokens: loss = −2·3·log π / 2, gradient = −2·3 / 2, with none through r
    logprobs = leaf(row(math.log(0.8), math.log(0.5)))
    behavior = row(math.log(0.4), math.log(0.5))
    loss, _ = dis_policy_loss(logprobs, behavior, row(3, 0), torch.ones(1, 2), EPS_LOW, EPS_HIGH)
    assert float(loss.detach()) == pytest.approx(-3 * math.log(0.8))
    assert gradient(loss, logprobs).tolist() == [pytest.approx([-3, 0])]


def test_a_token_outside_the_band_is_removed_and_not_clamped_whatever_the_sign_of_its_advantage() -> None:
    ratios = torch.tensor([[0.69, 0.71, 5.9, 6.1, 0.69, 6.1]], dtype=torch.float64)
    logprobs = leaf(ratios.log())
    loss, statistics = dis_policy_loss(
        logprobs, torch.zeros(1, 6), row(1, 1, 1, 1, -1, -1), torch.ones(1, 6), EPS_LOW, EPS_HIGH
    )
    assert gradient(loss, logprobs).tolist() == [pytest.approx([0, -0.71 / 6, -5.9 / 6, 0, 0, 0])]
    assert float(statistics["band_rejected"]) == pytest.approx(4 / 6)
    assert float(statistics["nonfinite_fraction"]) == 0


def test_bounds_are_strict_and_at_a_distance_from_one() -> None:
    logprobs = row(math.log1p(-0.2), math.log1p(-0.2) + 1e-9, math.log1p(0.28) - 1e-9, math.log1p(0.28))
    assert dis_keep(logprobs, torch.zeros(1, 4), torch.ones(1, 4), 0.2, 0.28).tolist() == [[False, True, True, False]]


def test_rejected_tokens_stay_in_the_denominator() -> None:
    logprobs = leaf(row(-1, -1, 50, NAN))
    loss, statistics = dis_policy_loss(logprobs, row(-1, -1, -1, -1), row(2, 2, 2, 2), torch.ones(1, 4), 0.3, 5.0)
    assert float(loss.detach()) == pytest.approx(2 * 2 / 4)
    assert gradient(loss, logprobs).tolist() == [[-0.5, -0.5, 0.0, 0.0]]
    assert float(statistics["band_rejected"]) == 0.5
    assert float(statistics["nonfinite_fraction"]) == 0.25


def test_half_precision_log_probabilities_are_compared_in_float32() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = dis_policy_loss(logprobs, torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), torch.ones(1, 2), 0.3, 5.0)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == 1.5


# --- any input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [200.0, -200.0, 1e30, INF, -INF, NAN])
def test_no_log_ratio_overflows_and_a_rejected_token_gives_exactly_nothing(bad: float, dtype: torch.dtype) -> None:
    logprobs = torch.tensor([[bad, -0.5]], dtype=dtype, requires_grad=True)
    behavior = torch.tensor([[-0.5, -0.5]], dtype=dtype)
    advantages = torch.tensor([[INF, 1.0]], dtype=dtype)
    loss, statistics = dis_policy_loss(logprobs, behavior, advantages, torch.ones(1, 2), EPS_LOW, EPS_HIGH)
    assert float(loss.detach()) == 0.25
    assert gradient(loss, logprobs).tolist() == [[0.0, -0.5]]
    assert float(statistics["nonfinite_fraction"]) == (0.0 if math.isfinite(bad) else 0.5)


@pytest.mark.parametrize("behavior", [INF, -INF, NAN])
def test_a_behavior_log_probability_that_is_not_finite_is_rejected(behavior: float) -> None:
    logprobs = leaf(row(-0.5, behavior))
    loss, statistics = dis_policy_loss(logprobs, row(behavior, behavior), row(1, 1), torch.ones(1, 2), 0.3, 5.0)
    assert float(loss.detach()) == 0
    assert gradient(loss, logprobs).tolist() == [[0.0, 0.0]]
    assert float(statistics["nonfinite_fraction"]) == 1


def test_a_fully_rejected_batch_gives_exactly_zero_and_leaves_the_weights_alone() -> None:
    weights = torch.nn.Parameter(torch.tensor([1.5, -2.0]))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    loss, statistics = dis_policy_loss(
        (100 * weights)[None], torch.full((1, 2), -1e4), torch.ones(1, 2), torch.ones(1, 2), EPS_LOW, EPS_HIGH
    )
    loss.backward()
    optimizer.step()
    assert loss.item() == 0
    assert weights.tolist() == [1.5, -2.0]
    assert float(statistics["band_rejected"]) == 1


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "dis": lambda x, mask: dis_policy_loss(x, torch.zeros_like(x), torch.ones_like(x), mask, 0.3, 5.0)[0],
    "ppo": lambda x, mask: ppo_clip_loss(x, torch.zeros_like(x), torch.ones_like(x), mask, 0.2, 0.28)[0],
    "value": lambda x, mask: value_loss(x, torch.ones_like(x), mask),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_action_tokens_gives_exactly_zero(name: str) -> None:
    x = torch.tensor([[NAN, INF, 3.0]], requires_grad=True)
    loss = LOSSES[name](x, torch.zeros(1, 3))
    assert loss.item() == 0
    assert gradient(loss, x).tolist() == [[0.0, 0.0, 0.0]]


anything = st.floats(width=32) | st.sampled_from([0.0, -0.1, 200.0, -200.0, NAN, INF, -INF])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(anything, anything, st.floats(-10, 10), st.booleans()), min_size=1, max_size=8))
def test_dis_agrees_with_its_definition_token_by_token_on_any_input(
    tokens: list[tuple[float, float, float, bool]],
) -> None:
    logprobs = leaf(row(*[token[0] for token in tokens]))
    behavior, advantages = row(*[token[1] for token in tokens]), row(*[token[2] for token in tokens])
    mask = torch.tensor([[token[3] for token in tokens]])
    loss, _ = dis_policy_loss(logprobs, behavior, advantages, mask, EPS_LOW, EPS_HIGH)

    count = max(1, sum(token[3] for token in tokens))
    expected, expected_gradient = 0.0, []
    for logprob, recorded, advantage, is_action in tokens:
        difference = logprob - recorded
        inside = is_action and math.isfinite(difference) and math.log(0.7) < difference < math.log(6)
        weight = math.exp(difference) * advantage if inside else 0.0
        expected -= weight * logprob / count if inside else 0.0
        expected_gradient.append(-weight / count)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert gradient(loss, logprobs).tolist() == [pytest.approx(expected_gradient, rel=1e-9, abs=1e-12)]


# --- one denominator ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dis", "ppo", "value"])
@pytest.mark.parametrize("cuts", [[1, 1, 1, 1, 1], [2, 3], [4, 1], [5]])
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradient(name: str, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, other, advantages = torch.randn(3, 5, 9, dtype=torch.float64, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < torch.tensor([[0.1], [0.3], [0.5], [0.9], [0.0]])
    total = int(mask.sum())

    def part(x: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        if name == "value":
            return value_loss(x[rows], other[rows], mask[rows], total), {}
        function = dis_policy_loss if name == "dis" else ppo_clip_loss
        return function(x[rows], other[rows], advantages[rows], mask[rows], 0.3, 5.0, total)

    whole = leaf(x)
    expected, expected_statistics = part(whole, slice(None))
    pieces = leaf(x)
    start, loss, statistics = 0, torch.zeros((), dtype=torch.float64), dict.fromkeys(expected_statistics, 0.0)
    for size in cuts:
        piece, figures = part(pieces, slice(start, start + size))
        loss = loss + piece
        statistics = {key: statistics[key] + float(figures[key]) for key in statistics}
        start += size
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, pieces), gradient(expected, whole))
    assert statistics == {key: pytest.approx(float(value)) for key, value in expected_statistics.items()}


# --- PPO and value ------------------------------------------------------------------------------


def test_ppo_clips_where_the_advantage_pushes_further_and_only_there() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64)
    logprobs = leaf(ratios.log())
    loss, statistics = ppo_clip_loss(logprobs, torch.zeros(1, 4), row(1, -1, 1, -1), torch.ones(1, 4), 0.2, 0.28)
    assert float(loss.detach()) == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8) / 4)
    assert gradient(loss, logprobs).tolist() == [pytest.approx([0, 1.5 / 4, -0.5 / 4, 0])]
    assert float(statistics["clip_fraction"]) == 0.5


def test_ppo_against_the_latest_policy_has_the_plain_policy_gradient() -> None:
    logprobs = leaf(row(-1.0, -2.0))
    loss, _ = ppo_clip_loss(logprobs, logprobs.detach(), row(3, -5), torch.ones(1, 2), 0.2, 0.28)
    assert gradient(loss, logprobs).tolist() == [[-1.5, 2.5]]


@pytest.mark.parametrize("bad", [200.0, 1e30, INF, -INF, NAN])
def test_ppo_stays_finite_on_any_input(bad: float) -> None:
    logprobs = torch.tensor([[bad, -0.5]], requires_grad=True)
    loss, statistics = ppo_clip_loss(
        logprobs, torch.tensor([[0.0, -0.5]]), -torch.ones(1, 2), torch.ones(1, 2), 0.2, 0.28
    )
    assert math.isfinite(loss.item())
    assert gradient(loss, logprobs).tolist() == [[0.0, 0.5]]
    assert float(statistics["nonfinite_fraction"]) == (0.0 if math.isfinite(bad) else 0.5)


def test_value_loss_is_the_mean_over_action_tokens_without_clipping() -> None:
    values = leaf(row(100, NAN, 1))
    loss = value_loss(values, row(0, NAN, 3), torch.tensor([[True, False, True]]))
    assert float(loss.detach()) == (100**2 + 2**2) / 2
    assert gradient(loss, values).tolist() == [[100.0, 0.0, -2.0]]


@pytest.mark.parametrize(
    ("eps_low", "eps_high", "message"),
    [
        (1.2, 5.0, r"eps_low must be in \(0, 1\), a distance from 1 and no bound: got 1.2"),
        (0.0, 5.0, r"eps_low must be in \(0, 1\)"),
        (0.3, 0.0, "eps_high must be above 0, a distance from 1 and no bound: got 0.0"),
        (0.3, INF, "eps_high must be above 0"),
    ],
)
def test_an_epsilon_outside_its_range_is_refused(eps_low: float, eps_high: float, message: str) -> None:
    for loss in (dis_policy_loss, ppo_clip_loss):
        with pytest.raises(ValueError, match=message):
            loss(row(0), row(0), row(0), torch.ones(1, 1), eps_low, eps_high)


# --- penalties ----------------------------------------------------------------------------------


def expected_over_vocabulary(estimate: Callable[[Tensor, Tensor], Tensor], logits: Tensor, behavior: Tensor) -> Tensor:
    """E over x ~ behavior of a per-token estimate, by enumeration."""
    logprobs = logits.log_softmax(0)
    terms = [estimate(logprobs[None, x, None], behavior[None, x, None]) for x in range(len(logits))]
    return (behavior.exp() * torch.stack(terms)).sum()


LOGITS = torch.tensor([0.3, -0.5, 0.9, 0.0], dtype=torch.float64)
BEHAVIOR = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
ONE = torch.ones(1, 1, dtype=torch.bool)


def test_kl_penalty_has_the_value_and_gradient_of_the_kl_to_the_behavior_policy() -> None:
    logits = leaf(LOGITS)
    estimate = expected_over_vocabulary(lambda p, b: kl_penalty(p, b, ONE, 1), logits, BEHAVIOR)
    exact_logits = leaf(LOGITS)
    logprobs = exact_logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - BEHAVIOR)).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(gradient(estimate, logits), gradient(exact, exact_logits))


def test_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    logits = leaf(LOGITS)
    estimate = expected_over_vocabulary(lambda p, b: entropy_bonus(p, b, ONE, 1), logits, BEHAVIOR)
    exact_logits = leaf(LOGITS)
    logprobs = exact_logits.log_softmax(0)
    torch.testing.assert_close(gradient(estimate, logits), gradient(-(logprobs.exp() * logprobs).sum(), exact_logits))


def test_penalties_leave_out_what_is_not_kept() -> None:
    logprobs = leaf(row(200, NAN, -0.5))
    keep = torch.tensor([[False, False, True]])
    loss = kl_penalty(logprobs, row(0, 0, -0.5), keep, 3) + entropy_bonus(logprobs, row(0, 0, -0.5), keep, 3)
    assert float(loss.detach()) == pytest.approx(-0.25 / 3)
    assert gradient(loss, logprobs).tolist() == [pytest.approx([0, 0, 0.5 / 3])]
