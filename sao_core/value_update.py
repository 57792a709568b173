"""The critic under training: values, targets, and one optimizer step on a batch.

Gradients of micro-batches and ranks add up to that of one loss with one denominator. Knows nothing of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sao_core.advantages import skip_observation_gae
from sao_core.batching import TrainingBatch
from sao_core.config import TrainConfig
from sao_core.models.critic import Critic, freeze, save_critic
from sao_core.models.logprobs import disable_dropout
from sao_core.objectives import value_loss
from sao_core.parallel import Engine, OptimizerSettings, Step


@dataclass(frozen=True)
class ValueUpdate:
    """One critic update: loss and values (B, T) before it was applied, and the optimizer step."""

    loss: float
    values: Tensor
    step: Step


class ValueModel:
    """A critic, its optimizer and its engine."""

    def __init__(
        self,
        critic: Critic,
        config: TrainConfig,
        device: torch.device,
        trainable: Sequence[str] | None,
        lr: float | None = None,
    ) -> None:
        """``trainable``: patterns as :func:`sao_core.models.critic.freeze` takes them; ``lr`` replaces `critic.lr`."""
        self.config = config
        settings = config.critic
        freeze(critic, trainable)
        disable_dropout(critic)
        if config.learner.zero_stage == 3:
            # ZeRO 3 drops a module's weights when its inputs' gradients are done. Below the first trainable module all
            # is frozen, so its inputs would have none, and its weights would go before they are used.
            critic.model.enable_input_require_grads()
        if config.model.gradient_checkpointing:
            critic.model.activation_checkpointing_enable()
        self.engine = Engine(
            critic,
            OptimizerSettings(
                settings.lr if lr is None else lr,
                settings.lr_warmup_steps,
                settings.weight_decay,
                settings.adam_betas,
                settings.grad_clip,
            ),
            zero_stage=config.learner.zero_stage,
            dtype=critic.model.dtype,
            device=device,
        )

    @torch.no_grad()
    def values(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """V_t of every token (B, T), and V behind each rollout's last token (B,)."""
        values, following = batch.blank(), batch.blank()
        for part in batch.parts:
            at_token, behind = self.engine(part.token_ids)
            part.scatter(values, at_token)
            part.scatter(following, behind)
        return self.engine.sum_over_ranks(values), batch.at_end(self.engine.sum_over_ranks(following))

    def needs_values(self, batch: TrainingBatch) -> bool:
        """Whether the targets depend on values: λ < 1, or a cut rollout that is bootstrapped."""
        return self.config.critic.gae_lambda < 1 or bool(self.bootstrapped(batch).any())

    def bootstrapped(self, batch: TrainingBatch) -> Tensor:
        """Rollouts (B,) whose return goes on beyond the cut."""
        return batch.truncated & (self.config.algorithm.truncation == "bootstrap")

    def targets(self, batch: TrainingBatch, values: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns G_t (B, T) that the critic learns: λ = 1 gives (bootstrapped) Monte-Carlo returns."""
        at_token, behind = values if values is not None else (batch.blank(), batch.blank()[:, 0])
        _, returns = skip_observation_gae(
            batch.rows.rewards,
            at_token,
            batch.rows.action_mask,
            self.config.algorithm.gamma,
            self.config.critic.gae_lambda,
            torch.where(self.bootstrapped(batch), behind, 0.0),
        )
        return returns

    def update(self, batch: TrainingBatch, targets: Tensor) -> ValueUpdate:
        """One optimizer step towards ``targets`` (B, T)."""
        values = batch.blank()
        total = torch.zeros((), device=values.device)
        for number, part in enumerate(batch.parts, start=1):
            at_token, _ = self.engine(part.token_ids)
            loss = value_loss(at_token, part.gather(targets), part.gather(batch.trained), batch.num_action_tokens)
            self.engine.backward(loss, last=number == len(batch.parts))
            part.scatter(values, at_token)
            total += loss.detach()
        step = self.engine.step()
        return ValueUpdate(float(self.engine.sum_over_ranks(total)), self.engine.sum_over_ranks(values), step)

    def save(self, folder: Path) -> None:
        """Write the critic as :meth:`Critic.load` reads it; every rank must call it."""
        state = self.engine.state_dict()
        if self.engine.rank == 0:
            save_critic(self.engine.module, folder, state)
