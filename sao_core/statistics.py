"""Statistics of evaluations: avg@k, pass@k, bootstrap intervals over prompts, and a paired test of two models.

Pure functions of scores. A prompt is what varies independently: its samples are averaged before anything is resampled.
Nothing here knows suites, files or ledgers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 10_000
EXACT_RESAMPLES = 10_000
"""With so few prompts that there are no more resamples than this (up to 5 prompts), all of them are taken."""
EXACT_FLIPS = 16
"""Up to so many prompts that differ, all 2^n sign flips are taken."""
FLIPS = 20_000
_CELLS = 4_000_000
"""Numbers that a batch of resamples holds at a time: memory does not grow with the number of prompts."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """How two models differ on the same prompts, first minus second."""

    difference: float
    """Mean over prompts of the difference between their means."""
    interval: Interval | None
    """Of the difference; None for a single prompt."""
    p_value: float
    """Two-sided: how often chance alone gives a difference as large."""
    prompts: int
    exact: bool
    """Whether the p-value counts all sign flips, or a sample of them."""


def avg_at_k(scores: Sequence[Sequence[float]]) -> float:
    """Mean over prompts of the mean score of a prompt's k samples: ``scores`` is (prompts, samples), rows may differ.

    With scores of 0 and 1 this is the accuracy that the SAO paper reports as avg@16 (its evaluation: "mean of 16
    runs"). A prompt weighs the same whatever the number of its samples.
    """
    return float(prompt_means(scores).mean())


def prompt_means(scores: Sequence[Sequence[float]]) -> Vector:
    """The mean score of each prompt, (prompts,); raises ValueError if there is no prompt, or one without samples."""
    if not scores or not all(len(row) for row in scores):
        raise ValueError("every prompt needs a sample, and there must be one prompt at least")
    return np.array([math.fsum(row) / len(row) for row in scores])


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k): the chance that k of a prompt's n samples, drawn without replacement, hold a solved one.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1); k = 1 gives c/n. Raises ValueError unless
    0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not 0 <= solved <= samples:
        raise ValueError(f"solved must lie between 0 and the {samples} samples: got {solved}")
    if not 1 <= k <= samples:
        raise ValueError(f"k must lie between 1 and the {samples} samples: got {k}")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def bootstrap_interval(
    values: Sequence[float] | Vector,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap interval of the mean of ``values``, one per prompt; None if there are fewer than two.

    Efron & Tibshirani 1993, ch. 13: prompts are drawn with replacement, and the interval runs from the (1−c)/2 to the
    (1+c)/2 quantile of the resampled means (the smallest one whose cumulative share reaches it). Up to 5 prompts all
    n^n resamples are taken, so nothing is random; beyond, ``resamples`` of them, drawn with ``seed``.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return None
    means = _all_resampled_means(sample) if _few(len(sample)) else _resampled_means(sample, resamples, seed)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, (tail, 1.0 - tail), method="inverted_cdf")
    return Interval(float(low), float(high))


def paired_test(first: Sequence[float] | Vector, second: Sequence[float] | Vector, *, seed: int = 0) -> PairedTest:
    """Compare two models by their means on the same prompts, (n,) each, prompt by prompt.

    The p-value is that of the sign-flip permutation test (Fisher 1935, §21): if the models were alike, each prompt's
    difference could as well have the other sign, so p is the share of sign assignments whose mean is at least as far
    from 0 as the observed one (two-sided). Differences of 0 change nothing and are left out of the count. With up to
    16 others all 2^n assignments are taken; beyond, p = (1 + b) / (1 + m) for b of m = 20 000 drawn with ``seed``,
    which is never 0 (Phipson & Smyth 2010). The interval is the bootstrap's of the mean difference. Raises ValueError
    if there is no prompt or the two are not equally long.
    """
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not len(differences):
        raise ValueError("a paired test needs a prompt that both have")
    moved = differences[differences != 0.0]
    observed = abs(float(moved.sum()))
    at_least = observed - 1e-9 * float(np.abs(moved).sum())  # equal sums may differ by rounding
    exact = len(moved) <= EXACT_FLIPS
    if exact:
        p_value = float(np.mean(np.abs(_all_flipped_sums(moved)) >= at_least))
    else:
        extreme = sum(int(np.sum(np.abs(sums) >= at_least)) for sums in _flipped_sums(moved, FLIPS, seed))
        p_value = (1 + extreme) / (1 + FLIPS)
    return PairedTest(
        float(differences.mean()), bootstrap_interval(differences, seed=seed), p_value, len(differences), exact
    )


def _few(prompts: int) -> bool:
    return prompts * math.log(prompts) <= math.log(EXACT_RESAMPLES)


def _all_resampled_means(sample: Vector) -> Vector:
    indices = np.array(list(product(range(len(sample)), repeat=len(sample))))
    means: Vector = sample[indices].mean(axis=1)
    return means


def _resampled_means(sample: Vector, resamples: int, seed: int) -> Vector:
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [
            sample[generator.integers(0, len(sample), (rows, len(sample)))].mean(axis=1)
            for rows in _batches(resamples, sample)
        ]
    )


def _all_flipped_sums(moved: Vector) -> Vector:
    """The 2^n sums of ±d_i, (2^n,)."""
    sums = np.zeros(1)
    for difference in moved:
        sums = np.concatenate([sums + difference, sums - difference])
    return sums


def _flipped_sums(moved: Vector, flips: int, seed: int) -> Iterator[Vector]:
    generator = np.random.default_rng(seed)
    for rows in _batches(flips, moved):
        signs = generator.integers(0, 2, (rows, len(moved)), dtype=np.int8)
        yield 2.0 * (signs @ moved) - moved.sum()


def _batches(rows: int, sample: Vector) -> Iterator[int]:
    """Row counts that add up to ``rows``, each small enough to hold."""
    most = max(1, _CELLS // len(sample))
    for start in range(0, rows, most):
        yield min(most, rows - start)
