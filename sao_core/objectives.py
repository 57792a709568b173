"""Policy and value losses: log-probabilities and advantages in, a scalar and detached statistics out.

Every loss is a sum over action tokens divided by one denominator, the number of action tokens of the
whole batch, so that it does not depend on how the batch was cut. Takes any input: what is masked or
rejected adds exactly 0 to the loss and to the gradient, whatever stands there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Count = int | float | Tensor
"""Action tokens of the whole batch, over all micro-batches and ranks; None in a call means: of this call."""

MAX_PPO_LOG_RATIO = 20.0
"""Beyond e^±20 a ratio is held constant, so that the unclipped side of PPO stays finite."""


def dis_keep(
    logprobs: Tensor, behavior_logprobs: Tensor, action_mask: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """Tokens that DIS trains on: action tokens with 1 − eps_low < r < 1 + eps_high, strictly.

    Args:
        logprobs: (B, T), log π_θ(x_t).
        behavior_logprobs: (B, T), log-probability under the policy that sampled x_t.
        action_mask: (B, T), true on action tokens.
        eps_low: distance of the lower bound from 1, in (0, 1).
        eps_high: distance of the upper bound from 1, above 0.

    Returns:
        (B, T) bool. Compared in log space, so nothing overflows; a non-finite log-ratio is outside.

    Raises:
        ValueError: an ε outside its range.
    """
    low, high = _log_bounds(eps_low, eps_high)
    log_ratio = _log_ratio(logprobs, behavior_logprobs)
    return action_mask.bool() & (log_ratio > low) & (log_ratio < high)


def dis_policy_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    eps_low: float,
    eps_high: float,
    num_action_tokens: Count | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct double-sided importance sampling (paper, DIS):

        r_t = exp(log π_θ(x_t) − b_t),   f(r) = r if 1−ε_low < r < 1+ε_high else 0
        loss = − Σ_t m_t · stopgrad(f(r_t) · Â_t) · log π_θ(x_t) / Σ m_t

    A token outside the band is removed, not clamped, whatever the sign of its advantage; it stays in
    the denominator.

    Args:
        logprobs: (B, T), log π_θ(x_t), carries the gradient.
        behavior_logprobs: (B, T), recorded when x_t was sampled.
        advantages: (B, T).
        action_mask: (B, T), true on action tokens; elsewhere any value may stand, NaN included.
        eps_low: distance of the lower bound from 1, in (0, 1).
        eps_high: distance of the upper bound from 1, above 0.
        num_action_tokens: the denominator; None counts ``action_mask``.

    Returns:
        The scalar loss (exactly 0 with gradient 0 if nothing is kept) and detached scalars, each over the
        same denominator, so that those of micro-batches add up to the batch's:
        ``band_rejected`` (non-finite ones included) and ``nonfinite_fraction``.

    Raises:
        ValueError: an ε outside its range.
    """
    mask = action_mask.bool()
    keep = dis_keep(logprobs, behavior_logprobs, mask, eps_low, eps_high)
    log_ratio = _log_ratio(logprobs, behavior_logprobs)
    ratio = torch.exp(torch.where(keep, log_ratio, 0.0))
    weight = torch.where(keep, ratio * _wide(advantages.detach()), 0.0)
    total = _denominator(mask, num_action_tokens, weight)
    loss = -(weight * torch.where(keep, _wide(logprobs), 0.0)).sum() / total
    return loss, {
        "band_rejected": (mask & ~keep).sum() / total,
        "nonfinite_fraction": (mask & ~torch.isfinite(log_ratio)).sum() / total,
    }


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    eps_low: float,
    eps_high: float,
    num_action_tokens: Count | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of PPO with separate bounds (Schulman et al. 2017; DAPO's clip-higher):

        loss = − Σ_t m_t · min(r_t Â_t, clip(r_t, 1−ε_low, 1+ε_high) Â_t) / Σ m_t,   r_t = exp(log π_θ − old)

    Args:
        logprobs: (B, T), log π_θ(x_t), carries the gradient.
        old_logprobs: (B, T), of the policy that the ratio starts at 1 with (GRPO, VAPO: latest trainer policy).
        advantages: (B, T).
        action_mask: (B, T), true on action tokens; elsewhere any value may stand, NaN included.
        eps_low: distance of the lower clip from 1, in (0, 1).
        eps_high: distance of the upper clip from 1, above 0.
        num_action_tokens: the denominator; None counts ``action_mask``.

    Returns:
        The scalar loss and detached scalars over the same denominator: ``clip_fraction`` (tokens whose
        gradient the clip removes) and ``nonfinite_fraction`` (tokens left out for a non-finite log-ratio).

    Raises:
        ValueError: an ε outside its range.
    """
    _log_bounds(eps_low, eps_high)
    mask = action_mask.bool()
    finite = mask & torch.isfinite(_log_ratio(logprobs, old_logprobs))
    log_ratio = torch.where(finite, _wide(logprobs), 0.0) - torch.where(finite, _wide(old_logprobs.detach()), 0.0)
    ratio = torch.exp(log_ratio.clamp(-MAX_PPO_LOG_RATIO, MAX_PPO_LOG_RATIO))
    advantage = torch.where(finite, _wide(advantages.detach()), 0.0)
    free = ratio * advantage
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * advantage
    total = _denominator(mask, num_action_tokens, free)
    loss = -torch.minimum(free, clipped).sum() / total
    return loss, {
        "clip_fraction": (clipped < free).sum() / total,
        "nonfinite_fraction": (mask & ~finite).sum() / total,
    }


def value_loss(values: Tensor, targets: Tensor, action_mask: Tensor, num_action_tokens: Count | None = None) -> Tensor:
    """Mean of (V_t − G_t)² over action tokens, without value clipping (paper, critic).

    Args:
        values: (B, T), V_t of the state in which x_t was chosen, carries the gradient.
        targets: (B, T), returns G_t.
        action_mask: (B, T), true on action tokens; elsewhere any value may stand, NaN included.
        num_action_tokens: the denominator; None counts ``action_mask``.

    Returns:
        The scalar loss; exactly 0 with gradient 0 without action tokens.
    """
    mask = action_mask.bool()
    error = torch.where(mask, _wide(values), 0.0) - torch.where(mask, _wide(targets.detach()), 0.0)
    return error.square().sum() / _denominator(mask, num_action_tokens, error)


def kl_penalty(logprobs: Tensor, behavior_logprobs: Tensor, keep: Tensor, num_action_tokens: Count) -> Tensor:
    """KL(π_θ ‖ behavior policy) estimated from the behavior policy's own tokens, for ``policy.kl_coef``:

        Σ_t [r_t log r_t − r_t + 1] / Σ m_t

    Each term is ≥ 0, and the expectation of its gradient r_t · log r_t · ∇log π_θ is ∇KL.

    Args:
        logprobs: (B, T), log π_θ(x_t), carries the gradient.
        behavior_logprobs: (B, T).
        keep: (B, T), tokens that enter: those of :func:`dis_keep`, so that no ratio overflows.
        num_action_tokens: action tokens of the whole batch.
    """
    log_ratio = torch.where(keep, _wide(logprobs), 0.0) - torch.where(keep, _wide(behavior_logprobs.detach()), 0.0)
    ratio = torch.exp(log_ratio)
    return (ratio * log_ratio - ratio + 1).sum() / _denominator(keep, num_action_tokens, ratio)


def entropy_bonus(logprobs: Tensor, behavior_logprobs: Tensor, keep: Tensor, num_action_tokens: Count) -> Tensor:
    """Surrogate whose gradient is that of the policy's entropy, from sampled tokens, for ``policy.entropy_coef``:

        − Σ_t stopgrad(r_t · log π_θ(x_t)) · log π_θ(x_t) / Σ m_t,     E[∇] = −E_π[log π ∇log π] = ∇H

    Only its gradient means anything; subtract it from the loss times the coefficient. Arguments as in
    :func:`kl_penalty`.
    """
    kept = torch.where(keep, _wide(logprobs), 0.0)
    ratio = torch.exp(kept.detach() - torch.where(keep, _wide(behavior_logprobs.detach()), 0.0))
    return -(ratio * kept.detach() * kept).sum() / _denominator(keep, num_action_tokens, ratio)


def _wide(x: Tensor) -> Tensor:
    """Half precision as float32; the rest as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _log_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    return _wide(logprobs.detach()) - _wide(behavior_logprobs.detach())


def _denominator(mask: Tensor, num_action_tokens: Count | None, like: Tensor) -> Tensor:
    """At least 1, so that a batch without action tokens gives 0 and not 0/0."""
    count = mask.sum() if num_action_tokens is None else num_action_tokens
    return torch.as_tensor(count, dtype=like.dtype, device=like.device).clamp(min=1)


def _log_bounds(eps_low: float, eps_high: float) -> tuple[float, float]:
    """Bounds of the log-ratio, computed in float64."""
    if not 0 < eps_low < 1:
        raise ValueError(f"eps_low must be in (0, 1), a distance from 1 and no bound: got {eps_low}")
    if not (eps_high > 0 and math.isfinite(eps_high)):
        raise ValueError(f"eps_high must be above 0, a distance from 1 and no bound: got {eps_high}")
    return math.log1p(-eps_low), math.log1p(eps_high)
