"""Value pretraining: the critic learns from rollouts of the initial policy before the policy moves.

All parameters train. Prompts are split, not rollouts, so that held-out explained variance is of prompts never seen;
training stops when it no longer improves, and the best weights go on into RL with a fresh optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from sao_core.admission import refusal
from sao_core.config import ConfigError, TrainConfig
from sao_core.diagnostics import explained_variance
from sao_core.learner import Learner
from sao_core.protocols import Rollout


def pretrain_value(
    learner: Learner,
    rollouts: Sequence[Rollout],
    config: TrainConfig,
    on_epoch: Callable[[int, float | None], None] = lambda epoch, explained: None,
) -> dict[str, float]:
    """Train the learner's critic on ``rollouts`` until held-out explained variance stops improving.

    ``on_epoch(epoch, held-out explained variance)`` is called after each pass, from 1. Afterwards the critic is frozen
    as its algorithm says. Returns `value_pretrain/…`: the best held-out explained variance (left out while undefined:
    all returns equal), its epoch, epochs made, training loss of the last one, and rollouts trained on and held out.

    Raises ConfigError if the rollouts cannot be split.
    """
    settings = config.critic.pretrain
    train, held_out = split(usable(rollouts, config), settings.holdout_fraction, config.seed)
    critic = learner.renew_critic(trainable=None, lr=settings.lr)
    held = learner.prepare(held_out)
    order = np.random.default_rng(config.seed)
    best, best_epoch, weights, loss = None, 0, critic.engine.state_dict(), 0.0
    for epoch in range(1, settings.max_epochs + 1):
        losses = []
        shuffled = order.permutation(len(train))
        for chosen in np.array_split(shuffled, max(1, round(len(train) / settings.minibatch_rollouts))):
            data = learner.prepare([train[i] for i in chosen])
            before = critic.values(data) if critic.needs_values(data) else None
            losses.append(critic.update(data, critic.targets(data, before)).loss)
        loss = float(np.mean(losses))
        values = critic.values(held)
        explained = explained_variance(*_on_actions(held.rows.action_mask, critic.targets(held, values), values[0]))
        if explained is not None and (best is None or explained > best):
            best, best_epoch, weights = explained, epoch, critic.engine.state_dict()
        on_epoch(epoch, explained)
        if epoch - best_epoch >= settings.patience:
            break
    learner.renew_critic(learner.algorithm.critic_trainable, weights=weights)
    metrics = {
        "value_pretrain/best_epoch": float(best_epoch),
        "value_pretrain/epochs": float(epoch),
        "value_pretrain/loss": loss,
        "value_pretrain/rollouts": float(len(train)),
        "value_pretrain/held_out_rollouts": float(len(held_out)),
    }
    return metrics if best is None else metrics | {"value_pretrain/explained_variance": best}


def usable(rollouts: Sequence[Rollout], config: TrainConfig) -> list[Rollout]:
    """Rollouts that say something about the policy, in the order of their requests."""
    kept = [rollout for rollout in rollouts if refusal(rollout, config, None, step=0) is None]
    return sorted(kept, key=lambda rollout: rollout[0].request_number)


def split(rollouts: Sequence[Rollout], holdout_fraction: float, seed: int) -> tuple[list[Rollout], list[Rollout]]:
    """Divide rollouts by prompt into (training, held out); the same seed gives the same split.

    Raises ConfigError with fewer than two prompts.
    """
    prompts = sorted({rollout[0].prompt_key for rollout in rollouts})
    if len(prompts) < 2:
        raise ConfigError(
            f"value pretraining needs rollouts of at least 2 prompts, to hold some out: got {len(rollouts)} usable "
            f"rollouts of {len(prompts)} prompts; raise critic.pretrain.rollouts, or set it to 0 to skip the stage"
        )
    count = min(len(prompts) - 1, max(1, round(holdout_fraction * len(prompts))))
    held = {prompts[i] for i in np.random.default_rng(seed).permutation(len(prompts))[:count]}
    return (
        [rollout for rollout in rollouts if rollout[0].prompt_key not in held],
        [rollout for rollout in rollouts if rollout[0].prompt_key in held],
    )


def _on_actions(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor[mask] for tensor in tensors]
