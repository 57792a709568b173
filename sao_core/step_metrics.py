"""What one step reports, by the names that MLflow, the ledger and the progress display show.

Pure functions of what a step has computed. A figure that is undefined (one sample, no spread) is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from sao_core.admission import UNTRAINABLE
from sao_core.batching import TrainingBatch
from sao_core.diagnostics import behavior_kl, effective_sample_size, explained_variance, ratio_mean, staleness
from sao_core.objectives import value_loss
from sao_core.policy_update import PolicyUpdate
from sao_core.protocols import Rollout
from sao_core.trajectory import Outcome
from sao_core.value_update import ValueUpdate


def rollout_metrics(rollouts: Sequence[Rollout], rejected: Mapping[str, str]) -> dict[str, float]:
    """Rewards, lengths and outcomes of a batch as it came; rollouts that failed have no reward.

    `rollout/tokens`, `rollout/action_tokens` and `rollout/turns` are means per rollout; `rollout/rejected/<reason>`
    counts the rollouts that are not trained on. In a mixture `reward/mean/<environment>` is of each that came.
    """
    tokens = [sum(s.num_tokens for s in rollout) for rollout in rollouts]
    scored = [rollout[0].score for rollout in rollouts if rollout[0].outcome not in UNTRAINABLE]
    reasons = Counter(rejected[r[0].trajectory_id] for r in rollouts if r[0].trajectory_id in rejected)
    metrics = {
        "rollout/count": float(len(rollouts)),
        "rollout/tokens": float(np.mean(tokens)),
        "rollout/tokens_total": float(np.sum(tokens)),
        "rollout/action_tokens": float(np.mean([sum(s.num_action_tokens for s in r) for r in rollouts])),
        "rollout/turns": float(np.mean([sum(s.num_turns for s in r) for r in rollouts])),
        "rollout/truncated": float(np.mean([r[0].outcome is Outcome.TRUNCATED for r in rollouts])),
    }
    if scored:
        metrics["reward/mean"] = float(np.mean(scored))
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout[0].outcome not in UNTRAINABLE:
            parts[rollout[0].environment].append(rollout[0].score)
    if len({rollout[0].environment for rollout in rollouts}) > 1:
        metrics |= {f"reward/mean/{name}": float(np.mean(scores)) for name, scores in parts.items()}
    return metrics | {f"rollout/rejected/{reason}": float(count) for reason, count in reasons.items()}


def value_metrics(updates: Sequence[ValueUpdate], data: TrainingBatch, targets: Tensor) -> dict[str, float]:
    """The K critic updates: loss and explained variance of the values from before, and the updates themselves."""
    norms = [u.step.grad_norm for u in updates if u.step.grad_norm is not None]
    return _defined(
        {
            "value/loss": updates[0].loss,
            "value/updates": float(len(updates)),
            "value/skipped_updates": float(len(updates) - len(norms)),
            "value/grad_norm": float(np.mean(norms)) if norms else None,
            "value/explained_variance": _explained(data, targets, updates[0].values),
            "value/return_std": float(targets[data.rows.action_mask].std(correction=0)),
        }
    )


def fit_metrics(
    data: TrainingBatch, targets: Tensor, values: Tensor, advantages: Tensor, stale_advantages: Tensor
) -> dict[str, float]:
    """How well the K updates fit this batch, and std(Â) with fresh values ÷ std(Â) with values from before them."""
    mask = data.rows.action_mask
    spread = float(stale_advantages[mask].std(correction=0))
    return _defined(
        {
            "value/loss_fit": float(value_loss(values, targets, data.trained, data.num_action_tokens)),
            "value/explained_variance_fit": _explained(data, targets, values),
            "value/advantage_shrink": float(advantages[mask].std(correction=0)) / spread if spread > 0 else None,
        }
    )


def policy_metrics(update: PolicyUpdate, data: TrainingBatch, advantages: Tensor) -> dict[str, float]:
    """The policy update: loss, gradient, and how far the policy is from the one that sampled the tokens."""
    mask = data.rows.action_mask
    logprobs, behavior = update.logprobs, data.rows.behavior_logprobs
    return _defined(
        {
            "policy/loss": update.loss,
            "policy/grad_norm": update.step.grad_norm,
            "policy/skipped_updates": float(not update.step.applied),
            **{f"policy/{name}": value for name, value in update.statistics.items()},
            "policy/ratio_mean": ratio_mean(logprobs, behavior, mask),
            "policy/ess": effective_sample_size(logprobs, behavior, mask),
            "policy/behavior_kl": behavior_kl(logprobs, behavior, mask),
            "policy/entropy": float(update.entropy[mask].mean()),
            "policy/advantage_std": float(advantages[mask].std(correction=0)),
            "policy/tokens_over_age": float((mask & ~data.trained).sum()) / data.num_action_tokens,
        }
    )


def staleness_metrics(data: TrainingBatch, ages: Tensor) -> dict[str, float]:
    """`staleness/…`, in updates."""
    return {f"staleness/{name}": value for name, value in staleness(ages, data.rows.action_mask).items()}


def _explained(data: TrainingBatch, targets: Tensor, values: Tensor) -> float | None:
    mask = data.rows.action_mask
    return explained_variance(targets[mask], values[mask])


def _defined(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None and np.isfinite(value)}
