"""One training step, start to end: targets → K value updates → fresh values → advantages → one policy update.

    update_value    consumes a batch; leaves the critic K updates further
    update_policy   consumes the same batch; leaves the policy at most one update further

Works on complete rollouts that it is handed, waits for nothing and stores nothing unasked. With several ranks every
one runs the same calls on the same batches and takes its share of the micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from sao_core.admission import group_numbers, refusal, token_ages
from sao_core.advantages import rollout_advantages
from sao_core.algorithms import resolve
from sao_core.batching import TrainingBatch
from sao_core.config import ConfigError, TrainConfig
from sao_core.models.critic import HEAD_FILE, Critic
from sao_core.models.folder import CRITIC_FOLDER
from sao_core.models.policy import load_policy, load_tokenizer, resolve_device
from sao_core.parallel import init_distributed
from sao_core.policy_update import PolicyModel, PolicyUpdate
from sao_core.protocols import Batch, Rollout
from sao_core.random_state import load_random_state, save_random_state, seed_all
from sao_core.step_metrics import (
    fit_metrics,
    policy_metrics,
    rollout_metrics,
    staleness_metrics,
    value_metrics,
)
from sao_core.value_update import ValueModel

STATE_FILE = "learner.json"
POLICY_ENGINE = "policy_engine"
CRITIC_ENGINE = "critic_engine"


@dataclass
class _Step:
    """What one step has found out so far. Tensors are (B, T), one row per rollout that is trained on."""

    number: int
    data: TrainingBatch
    ages: Tensor
    baselines: Mapping[str, tuple[float, ...]]
    values_before: Tensor | None = None
    behind_before: Tensor | None = None
    targets: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    policy: PolicyUpdate | None = None


class Learner:
    """Policy, critic and their optimizers."""

    def __init__(self, config: TrainConfig, folder: Path | str, *, seed: int = 0, device: str = "auto") -> None:
        """Load the policy in ``folder`` and, if it is there, the critic in ``folder/critic``.

        Raises ConfigError for a folder or settings that cannot be trained.
        """
        seed_all(seed)
        self.config = config
        self.algorithm = resolve(config)
        self.device = resolve_device(device)
        self.folder = Path(folder)
        if config.algorithm.truncation == "bootstrap" and not self.algorithm.has_critic:
            raise ConfigError(
                f"algorithm.truncation=bootstrap needs a critic, and {self.algorithm.name} has none; "
                "set it to zero or exclude"
            )
        init_distributed(self.device)
        policy = load_policy(self.folder, config.model.dtype, self.device)
        self.policy = PolicyModel(policy, load_tokenizer(self.folder), config, self.algorithm, self.device)
        self.critic_pretrained = not self.algorithm.has_critic or (self.folder / CRITIC_FOLDER / HEAD_FILE).is_file()
        """Whether the policy came with its critic, so that value pretraining may be left out."""
        self.policy_moved = False
        """Whether the last :meth:`update_policy` changed the weights."""
        self.trained_ids: tuple[str, ...] = ()
        """Trajectories that the current step trains on."""
        self.rejected: dict[str, str] = {}
        """Trajectory → reason, for the rest of the current batch."""
        self._critic: ValueModel | None = None
        self._step: _Step | None = None

    # --- one step -------------------------------------------------------------------------------

    def update_value(self, batch: Batch, policy_steps: Mapping[int, int]) -> dict[str, float]:
        """Targets → K critic updates. ``policy_steps``: version → step of the policy. Returns metrics."""
        self._step = step = self._begin(batch, policy_steps)
        metrics = rollout_metrics(batch.rollouts, self.rejected)
        if step is None:
            return metrics
        metrics |= staleness_metrics(step.data, step.ages)
        if self.algorithm.has_critic:
            critic = self.critic
            metrics["value/lr"] = critic.engine.lr
            before = critic.values(step.data) if critic.needs_values(step.data) else None
            step.targets = critic.targets(step.data, before)
            updates = [critic.update(step.data, step.targets) for _ in range(self.algorithm.critic_updates)]
            step.values_before, step.behind_before = before or (updates[0].values, None)
            metrics |= value_metrics(updates, step.data, step.targets)
        return metrics

    def update_policy(self) -> dict[str, float]:
        """Fresh values → advantages → one policy update on the batch of :meth:`update_value`. Returns metrics.

        The policy stays as it is before `policy.first_update_step` and when the gradient is not finite. Raises
        NonFiniteGradients at the third such gradient in a row.
        """
        step, self.policy_moved = self._step, False
        if step is None:
            return {}
        metrics: dict[str, float] = {}
        behind = None
        if self.algorithm.has_critic:
            step.values, behind = self.critic.values(step.data)
        step.advantages = self._advantages(step, step.values, behind)
        if step.targets is not None and step.values is not None:
            stale_advantages = self._advantages(step, step.values_before, step.behind_before)
            metrics |= fit_metrics(step.data, step.targets, step.values, step.advantages, stale_advantages)
        if step.number >= self.first_policy_step:
            metrics["policy/lr"] = self.policy.engine.lr
            step.policy = self.policy.update(step.data, step.advantages)
            self.policy_moved = step.policy.step.applied
            metrics |= policy_metrics(step.policy, step.data, step.advantages)
        return metrics

    @property
    def first_policy_step(self) -> int:
        """First step that moves the policy; without a critic there is nothing to wait for."""
        return self.config.policy.first_update_step if self.algorithm.has_critic else 1

    def _begin(self, batch: Batch, policy_steps: Mapping[int, int]) -> _Step | None:
        """Sort out what is trained on, stack it, and look up how old its tokens are; None if nothing is left."""
        self.rejected, admitted = {}, []
        for rollout in batch.rollouts:
            ages_count = rollout[0].trajectory_id not in batch.rewound
            reason = refusal(rollout, self.config, policy_steps if ages_count else None, batch.step)
            if reason is None:
                admitted.append(rollout)
            else:
                self.rejected |= {segment.trajectory_id: reason for segment in rollout}
        self.trained_ids = tuple(segment.trajectory_id for rollout in admitted for segment in rollout)
        if not admitted:
            return None
        data = self.prepare(admitted)
        ages = token_ages(data.rows.policy_versions, policy_steps, batch.step)
        limit = self.config.asynchrony.max_token_age
        return _Step(batch.step, data if limit is None else data.without(ages > limit), ages, batch.baselines)

    def _advantages(self, step: _Step, values: Tensor | None, behind: Tensor | None) -> Tensor:
        data = step.data
        return rollout_advantages(
            self.algorithm,
            self.config.algorithm,
            data.rows.rewards,
            values,
            data.rows.action_mask,
            0.0 if behind is None else torch.where(self.critic.bootstrapped(data), behind, 0.0),
            group_numbers(data.rollouts),
            [step.baselines.get(rollout[0].trajectory_id, ()) for rollout in data.rollouts],
        )

    # --- parts ----------------------------------------------------------------------------------

    @property
    def critic(self) -> ValueModel:
        """The critic as RL trains it; loaded when first asked for. Raises ValueError if the algorithm has none."""
        if self._critic is None:
            self._critic = ValueModel(self._load_critic(), self.config, self.device, self.algorithm.critic_trainable)
        return self._critic

    def renew_critic(
        self,
        trainable: Sequence[str] | None,
        lr: float | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> ValueModel:
        """Start over with a fresh optimizer: which parameters train, at which rate, from which weights.

        None stands for all parameters, `critic.lr`, and the weights as first loaded.
        """
        if self._critic is not None:
            self._critic.engine.close()
            self._critic = None
        critic = self._load_critic()
        if weights is not None:
            critic.load_state_dict(weights)
        self._critic = ValueModel(critic, self.config, self.device, trainable, lr)
        return self._critic

    def _load_critic(self) -> Critic:
        if not self.algorithm.has_critic:
            raise ValueError(f"{self.algorithm.name} has no critic")
        folder, dtype = self.folder / CRITIC_FOLDER, self.config.model.dtype
        if (folder / HEAD_FILE).is_file():
            return Critic.load(folder, dtype, self.device)
        return Critic.from_policy(self.folder, dtype, self.device)

    def prepare(self, rollouts: Sequence[Rollout]) -> TrainingBatch:
        """Stack rollouts and cut them into this rank's micro-batches."""
        engine = self.policy.engine
        return TrainingBatch.of(
            rollouts, self.config.learner.micro_batch_tokens, self.device, engine.rank, engine.world_size
        )

    def logprob_gap(self, rollouts: Sequence[Rollout]) -> float:
        """Mean |log π(x_t) − b_t| over the action tokens: recomputed here against recorded at sampling.

        Near 0 for rollouts of exactly the current weights, if engine and learner compute the same distribution.
        """
        data = self.prepare(rollouts)
        mask = data.rows.action_mask
        return float((self.policy.logprobs(data) - data.rows.behavior_logprobs)[mask].abs().mean())

    def token_records(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """What the last step saw and made of each token, by trajectory id, each column of length T.

        ``logprobs`` (of the policy before the update; 0 where no update was made), ``values_before`` and ``values``
        (before and after the K updates), ``advantages``, and ``kept`` (True where it entered the policy gradient).
        """
        step = self._step
        if step is None:
            return {}
        blank = step.data.blank()
        columns = {
            "logprobs": blank if step.policy is None else step.policy.logprobs,
            "values_before": blank if step.values_before is None else step.values_before,
            "values": blank if step.values is None else step.values,
            "advantages": blank if step.advantages is None else step.advantages,
            "kept": blank.bool() if step.policy is None else step.policy.kept,
        }
        return step.data.by_trajectory(columns)

    # --- keeping --------------------------------------------------------------------------------

    def save_policy(self, folder: Path | str) -> None:
        """Write the policy as a Hugging Face folder."""
        self.policy.save(Path(folder))

    def save_critic(self, folder: Path | str) -> None:
        """Write the critic, to be put as `critic/` beside the policy it belongs to."""
        self.critic.save(Path(folder))

    def save_checkpoint(self, folder: Path | str, state: Mapping[str, Any] | None = None) -> None:
        """Write everything that a restart needs; ``state`` is the caller's own, as JSON.

        The folder is a model folder too (policy, tokenizer, `critic/`): pass it to :class:`Learner`, then to
        :meth:`load_checkpoint`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_policy(folder)
        self.policy.engine.save(folder / POLICY_ENGINE)
        if self.algorithm.has_critic:
            self.save_critic(folder / CRITIC_FOLDER)
            self.critic.engine.save(folder / CRITIC_ENGINE)
        save_random_state(folder)
        (folder / STATE_FILE).write_text(json.dumps(dict(state or {})))

    def load_checkpoint(self, folder: Path | str) -> dict[str, Any]:
        """Restore both engines with optimizers and counters, and the random states; returns the caller's state.

        Learning rates, warm-up and betas are those of the present configuration.
        """
        folder = Path(folder)
        self.policy.engine.load(folder / POLICY_ENGINE)
        if self.algorithm.has_critic:
            self.critic.engine.load(folder / CRITIC_ENGINE)
        load_random_state(folder)
        return dict(json.loads((folder / STATE_FILE).read_text()))

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rates of the next optimizer steps, by model."""
        rates = {"policy": self.policy.engine.lr}
        return rates | {"critic": self.critic.engine.lr} if self.algorithm.has_critic else rates
