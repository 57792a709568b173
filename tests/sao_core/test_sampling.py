import numpy as np
import torch

from sao_core.rollout.sampling import draw, policy_logprobs, truncate, uniforms


def test_uniforms_are_those_of_splitmix64() -> None:
    seeds, counters = np.array([1234567, 1234567], np.uint64), np.array([0, 1], np.uint64)
    published = np.array([6457827717110365317, 3203168211198807973], np.uint64)
    np.testing.assert_array_equal(uniforms(seeds, counters), ((published >> np.uint64(32)).astype(float) + 0.5) / 2**32)


def test_draws_follow_the_distribution_and_never_take_what_has_no_mass() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    count = 40_000
    uniform = torch.from_numpy(uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)))
    drawn = draw(probabilities.log().expand(count, -1), uniform).bincount(minlength=6).double() / count
    np.testing.assert_allclose(drawn.numpy(), probabilities.numpy(), atol=0.01)
    assert drawn[[0, 2, 5]].sum() == 0


def test_the_smallest_and_the_largest_uniform_stay_inside() -> None:
    edges = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    logprobs = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).log().expand(2, -1)
    assert draw(logprobs, edges).tolist() == [1, 2]


def test_temperature_scales_logits_before_the_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    expected = torch.tensor([[0.5, 1.0, 2.0]]).softmax(-1).log()
    torch.testing.assert_close(policy_logprobs(logits, torch.tensor([2.0])), expected)


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logprobs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(5, -1)
    top_p = torch.tensor([1.0, 1.0, 0.6, 0.75, 1e-9], dtype=torch.float64)
    top_k = torch.tensor([0.0, 2.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    kept = truncate(logprobs, top_p, top_k).isfinite()
    assert kept.tolist() == [
        [True, True, True, True],
        [False, True, False, True],
        [False, True, False, True],
        [False, True, False, True],
        [False, True, False, False],
    ]
