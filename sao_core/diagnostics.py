"""What tells a healthy update from a sick one: numbers about values, importance ratios, ages and lengths.

Everything is computed in float64 from what a step has already, and comes as plain floats. An undefined figure is
None or NaN, never a number that looks like a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

SAME_RETURN = 1e-6
"""Returns whose spread is within this share of their size differ by rounding only."""


def explained_variance(returns: Tensor, values: Tensor) -> float | None:
    """1 − Var(G − V) / Var(G): 1 for perfect values, 0 for a constant, below 0 for worse than a constant.

    Args:
        returns: G, any shape, action tokens only.
        values: V, in the same shape.

    Returns:
        None where it is undefined: fewer than two samples, or all returns the same. NaN if an input is not finite.

    Raises:
        ValueError: shapes differ.
    """
    if returns.shape != values.shape:
        raise ValueError(
            f"returns and values must have one shape: got {tuple(returns.shape)} and {tuple(values.shape)}"
        )
    targets = returns.detach().double().flatten()
    if targets.numel() < 2 or bool(targets.max() - targets.min() <= SAME_RETURN * targets.abs().max()):
        return None
    unexplained = (targets - values.detach().double().flatten()).var(correction=0)
    return float(1 - unexplained / targets.var(correction=0))


def ratio_mean(logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor) -> float:
    """Mean of r = π_θ / behavior over action tokens, without a band; near 1 while the two are close.

    Args:
        logprobs: (B, T), log π_θ(x_t).
        behavior_logprobs: (B, T), recorded at sampling.
        action_mask: (B, T), true on action tokens.

    Returns:
        NaN without a finite log-ratio; inf only beyond what float64 holds.
    """
    log_ratio = _log_ratio(logprobs, behavior_logprobs, action_mask)
    if log_ratio.numel() == 0:
        return math.nan
    return _exp(float(torch.logsumexp(log_ratio, 0)) - math.log(log_ratio.numel()))


def effective_sample_size(logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor) -> float:
    """(Σ r)² / (n · Σ r²) over action tokens: the share of them that the ratios leave effective, in (0, 1].

    In log space, so that no ratio overflows. Arguments as in :func:`ratio_mean`; NaN without a finite log-ratio.
    """
    log_ratio = _log_ratio(logprobs, behavior_logprobs, action_mask)
    if log_ratio.numel() == 0:
        return math.nan
    total, total_of_squares = torch.logsumexp(log_ratio, 0), torch.logsumexp(2 * log_ratio, 0)
    return _exp(float(2 * total - total_of_squares) - math.log(log_ratio.numel()))


def behavior_kl(logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor) -> float:
    """KL(behavior ‖ π_θ) per action token, estimated on the behavior policy's own samples by k3 = r − 1 − log r.

    Unbiased and never negative (Schulman, Approximating KL divergence, 2020); the plain mean of −log r is as
    unbiased but noisier. Arguments as in :func:`ratio_mean`; NaN without a finite log-ratio.
    """
    log_ratio = _log_ratio(logprobs, behavior_logprobs, action_mask)
    if log_ratio.numel() == 0:
        return math.nan
    return float((torch.expm1(log_ratio) - log_ratio).mean())


def staleness(ages: Tensor, action_mask: Tensor) -> dict[str, float]:
    """How old the sampled tokens of a batch are, in updates.

    Args:
        ages: (B, T), current step − step of the policy that sampled the token; 0 is on-policy.
        action_mask: (B, T), true on action tokens.

    Returns:
        ``queue``: mean over rollouts of the age of the newest token (complete → used), ``generation``: mean over
        rollouts of oldest − newest (updates that passed while it was sampled), ``mean`` and ``max`` over tokens.
        Empty without action tokens.
    """
    mask = action_mask.bool()
    rows = mask.any(1)
    if not bool(rows.any()):
        return {}
    age = ages.double()
    newest = torch.where(mask, age, math.inf).amin(1)[rows]
    oldest = torch.where(mask, age, -math.inf).amax(1)[rows]
    return {
        "queue": float(newest.mean()),
        "generation": float((oldest - newest).mean()),
        "mean": float(age[mask].mean()),
        "max": float(oldest.max()),
    }


def used_by_length(lengths: Sequence[int], used: Sequence[bool], parts: int = 10) -> tuple[float | None, ...]:
    """Share of rollouts that were trained on, by length from the shortest tenth to the longest.

    A share that falls towards the end says that long rollouts are being lost.

    Args:
        lengths: action tokens of every rollout issued.
        used: for each, whether an update trained on it.
        parts: into how many equal parts the sorted lengths are cut.

    Returns:
        ``parts`` shares; None for a part without rollouts.

    Raises:
        ValueError: sequences of different lengths, or fewer than one part.
    """
    if len(lengths) != len(used):
        raise ValueError(f"used must say it for each of {len(lengths)} lengths: got {len(used)}")
    if parts < 1:
        raise ValueError(f"parts must be at least 1: got {parts}")
    by_length = [flag for _, flag in sorted(zip(lengths, used, strict=True), key=lambda pair: pair[0])]
    cuts = [round(part * len(by_length) / parts) for part in range(parts + 1)]
    slices = [by_length[start:stop] for start, stop in pairwise(cuts)]
    return tuple(sum(part) / len(part) if part else None for part in slices)


def _log_ratio(logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """The finite log-ratios of action tokens, flat, in float64."""
    mask = action_mask.bool()
    log_ratio = logprobs.detach()[mask].double() - behavior_logprobs.detach()[mask].double()
    return log_ratio[torch.isfinite(log_ratio)]


def _exp(x: float) -> float:
    return math.inf if x > math.log(torch.finfo(torch.float64).max) else math.exp(x)
