"""The policy under training: log-probabilities of what was sampled, and one optimizer step on a batch.

The behavior policy's log-probabilities are those recorded at sampling; they are never recomputed here. Knows nothing
of the critic.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sao_core.algorithms import Algorithm, Objective
from sao_core.batching import TrainingBatch
from sao_core.config import TrainConfig
from sao_core.models.logprobs import TokenScorer, disable_dropout
from sao_core.models.lora import add_lora, merge_lora
from sao_core.models.policy import save_policy
from sao_core.objectives import dis_keep, dis_policy_loss, entropy_bonus, kl_penalty, ppo_clip_loss
from sao_core.parallel import Engine, OptimizerSettings, Step


@dataclass(frozen=True)
class PolicyUpdate:
    """One policy update; tensors (B, T) are those of the policy before it was applied."""

    loss: float
    statistics: dict[str, float]
    logprobs: Tensor
    entropy: Tensor
    kept: Tensor
    step: Step


class PolicyModel:
    """A policy, its optimizer and its engine."""

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainConfig,
        algorithm: Algorithm,
        device: torch.device,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.algorithm = algorithm
        disable_dropout(policy)
        if config.policy.lora is not None:
            add_lora(policy, config.policy.lora)
        if config.model.gradient_checkpointing:
            policy.activation_checkpointing_enable()
        scorer = TokenScorer(policy, config.rollout.temperature, config.model.logprob_chunk_tokens)
        scorer.check()
        settings = config.policy
        self.engine = Engine(
            scorer,
            OptimizerSettings(
                settings.lr,
                settings.lr_warmup_steps,
                settings.weight_decay,
                settings.adam_betas,
                settings.grad_clip,
            ),
            zero_stage=config.learner.zero_stage,
            dtype=policy.dtype,
            device=device,
        )

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """log π(x_t) of every action token under the current weights (B, T), 0 elsewhere."""
        rows = batch.blank()
        for part in batch.parts:
            part.scatter(rows, self.engine(part.token_ids, part.gather(batch.rows.action_mask))[0])
        return self.engine.sum_over_ranks(rows)

    def update(self, batch: TrainingBatch, advantages: Tensor) -> PolicyUpdate:
        """One optimizer step with ``advantages`` (B, T)."""
        logprobs, entropy = batch.blank(), batch.blank()
        total = torch.zeros((), device=logprobs.device)
        for number, part in enumerate(batch.parts, start=1):
            scores, entropies = self.engine(part.token_ids, part.gather(batch.rows.action_mask))
            loss, _ = self._loss(
                scores,
                part.gather(batch.rows.behavior_logprobs),
                part.gather(advantages),
                part.gather(batch.trained),
                batch.num_action_tokens,
            )
            self.engine.backward(loss, last=number == len(batch.parts))
            part.scatter(logprobs, scores)
            part.scatter(entropy, entropies)
            total += loss.detach()
        step = self.engine.step()
        logprobs, entropy = self.engine.sum_over_ranks(logprobs), self.engine.sum_over_ranks(entropy)
        behavior, trained = batch.rows.behavior_logprobs, batch.trained
        _, statistics = self._loss(logprobs, behavior, advantages, trained, batch.num_action_tokens)
        return PolicyUpdate(
            loss=float(self.engine.sum_over_ranks(total)),
            statistics={name: float(value) for name, value in statistics.items()},
            logprobs=logprobs,
            entropy=entropy,
            kept=self._kept(logprobs, behavior, trained),
            step=step,
        )

    def _loss(
        self, logprobs: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, num_action_tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The algorithm's objective, plus the penalties that are switched on."""
        settings = self.config.algorithm
        if self.algorithm.objective is Objective.DIS:
            loss, statistics = dis_policy_loss(
                logprobs, behavior, advantages, mask, settings.eps_low, settings.eps_high, num_action_tokens
            )
        else:  # one update per batch, so the latest trainer policy is the one that computes these log-probabilities
            loss, statistics = ppo_clip_loss(
                logprobs,
                logprobs.detach(),
                advantages,
                mask,
                settings.ppo_eps_low,
                settings.ppo_eps_high,
                num_action_tokens,
            )
        kl_coef, entropy_coef = self.config.policy.kl_coef, self.config.policy.entropy_coef
        if kl_coef or entropy_coef:
            keep = dis_keep(logprobs, behavior, mask, settings.eps_low, settings.eps_high)
            loss = loss + kl_coef * kl_penalty(logprobs, behavior, keep, num_action_tokens)
            loss = loss - entropy_coef * entropy_bonus(logprobs, behavior, keep, num_action_tokens)
        return loss, statistics

    def _kept(self, logprobs: Tensor, behavior: Tensor, trained: Tensor) -> Tensor:
        """Tokens (B, T) that entered the policy gradient."""
        if self.algorithm.objective is not Objective.DIS:
            return trained & torch.isfinite(logprobs)
        return dis_keep(logprobs, behavior, trained, self.config.algorithm.eps_low, self.config.algorithm.eps_high)

    def save(self, folder: Path) -> None:
        """Write policy and tokenizer as a Hugging Face folder; every rank must call it."""
        state = {name.removeprefix("policy."): tensor for name, tensor in self.engine.state_dict().items()}
        if self.config.policy.lora is not None:
            state = merge_lora(state, self.config.policy.lora)
        if self.engine.rank == 0:
            save_policy(self.engine.module.policy, self.tokenizer, folder, state)
