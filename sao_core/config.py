"""Every setting of a training run: one pydantic model per room; a field's description is its documentation.

Defaults are the ones to recommend. Nothing here reads files or environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from sao_core.sections import ConfigError as ConfigError
from sao_core.sections import Section as Section
from sao_core.sections import explain as explain
from sao_core.sections import nearest as nearest
from sao_core.sections import setting_names as setting_names

AlgorithmName = Literal[
    "sao",
    "sao-single-update",
    "sao-full-critic",
    "sao-dis-only",
    "sao-step-mean",
    "sao-step-last",
    "vapo",
    "grpo",
    "grpo-dis",
    "running-mean",
    "running-mean-global",
]


class ModelConfig(Section):
    """The policy to start from."""

    path: str = Field(
        "tiny",
        description="A local Hugging Face folder of a causal LM (one that `sao export` wrote brings its critic along), "
        "`models:/NAME@champion`, `run:RUN@STEP`, or `tiny`: a Qwen3-MoE model of under a million parameters, built "
        "from nothing.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of weights and activations.")
    logprob_chunk_tokens: int = Field(
        4096,
        ge=1,
        description="Tokens whose logits exist at once, so that memory does not grow with tokens × vocabulary.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )


class EnvironmentConfig(Section):
    """The tasks that the agent is trained on."""

    name: str = Field(
        "calculator", description="One that comes with the package (docs/environments.md), or `module:attribute`."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The environment's own settings; `sao settings` lists them."
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over a finite set of tasks, after which the run ends, its last batch smaller if need be; "
        "empty: as many as `learner.updates` take.",
    )
    drop_after: int | None = Field(
        None,
        ge=2,
        description="A prompt of a finite set whose last this many rollouts all earned the same, solved or hopeless, "
        "is asked no more; another takes its place. Empty: all are asked again.",
    )

    @property
    def ends(self) -> bool:
        """Whether the tasks may come to an end before the updates do."""
        return self.epochs is not None or self.drop_after is not None


class AlgorithmConfig(Section):
    """How trajectories become gradients."""

    name: AlgorithmName = Field("sao", description="Preset: advantage × objective × critic schedule × group size.")
    eps_low: float = Field(
        0.3, gt=0, lt=1, description="Tokens with ratio ≤ 1 − eps_low are removed. A distance from 1, not a bound."
    )
    eps_high: float = Field(
        5.0,
        gt=0,
        description="Tokens with ratio ≥ 1 + eps_high are removed. Paper: maths (0.3, 5.0), coding (0.8, 3.0).",
    )
    ppo_eps_low: float = Field(0.2, gt=0, lt=1, description="Lower clip distance of the presets with a PPO objective.")
    ppo_eps_high: float = Field(0.28, gt=0, description="Upper clip distance of the presets with a PPO objective.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per action token.")
    lambda_alpha: float = Field(
        1.5, gt=0, description="λ of the policy = 1 − 1/(alpha · number of action tokens); 1.5 gives 1/3 for one token."
    )
    truncation: Literal["zero", "bootstrap", "exclude"] = Field(
        "zero",
        description="A rollout cut by a limit: worth nothing beyond the cut (a failed attempt), "
        "bootstrapped with the critic's value, or left out.",
    )
    whiten_advantages: bool = Field(False, description="Normalise advantages over the action tokens of a batch.")
    group_size: int | None = Field(
        None, ge=1, description="Rollouts per prompt; empty takes the preset's (1, or 8 for grpo)."
    )
    running_mean_window: int | None = Field(
        None,
        ge=1,
        description="Rewards a running mean looks back on; empty takes the preset's (8 per prompt, 128 global).",
    )


class LoraConfig(Section):
    """Low-rank adapters instead of all weights: less memory, and a backward pass without most weight gradients."""

    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: int = Field(32, ge=1, description="Their scale: alpha ÷ rank times B·A is added to a weight.")
    targets: tuple[str, ...] | None = Field(
        None, description="Names of the linear layers that get one, e.g. `q_proj`; empty: all but the output head."
    )


class PolicyConfig(Section):
    """Optimising the policy."""

    lr: float = Field(1e-6, gt=0, description="AdamW learning rate. Paper: 1e-6 at 30B.")
    lr_warmup_steps: int = Field(0, ge=0, description="Policy updates over which the learning rate rises from 0.")
    first_update_step: int = Field(
        10,
        ge=1,
        description="First step that moves the policy; steps before it train the critic only. 1 = from the start.",
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moment decay rates.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of KL(policy ‖ behavior policy), estimated per token. Paper: none."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of an entropy bonus. Paper: none.")
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters only (needs the extra `lora`); empty: all weights. Paper: all."
    )


class ValuePretrainConfig(Section):
    """Training the critic alone, before the policy moves."""

    rollouts: int = Field(512, ge=0, description="Rollouts of the initial policy to learn from; 0 skips the stage.")
    holdout_fraction: float = Field(0.2, gt=0, lt=0.9, description="Share held out to measure explained variance.")
    max_epochs: int = Field(20, ge=1, description="Passes over the data at most.")
    patience: int = Field(
        3, ge=1, description="Stop after this many epochs without a better held-out explained variance."
    )
    minibatch_rollouts: int = Field(32, ge=1, description="Rollouts per optimizer step.")
    lr: float | None = Field(None, gt=0, description="Learning rate of this stage; empty takes critic.lr.")


class CriticConfig(Section):
    """The value model: the policy's architecture and initial weights with a scalar head."""

    lr: float = Field(5e-6, gt=0, description="AdamW learning rate. Paper: 5e-6 at 30B.")
    lr_warmup_steps: int = Field(
        10, ge=0, description="Critic optimizer steps over which the learning rate rises from 0."
    )
    updates_per_batch: int | None = Field(
        None, ge=1, description="K, critic updates per batch; empty takes the preset's (sao: 2)."
    )
    trainable: tuple[str, ...] | None = Field(
        None,
        description="Patterns (fnmatch) of parameter names that train during RL, e.g. `*.mlp.experts.*`; the head "
        "always trains. Empty takes the preset's: MoE/MLP projections, attention frozen.",
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moment decay rates.")
    grad_clip: float = Field(10.0, gt=0, description="Largest gradient norm; 1.0 starves a critic whose norm is 7–70.")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="λ of the value targets; 1 = Monte-Carlo returns.")
    pretrain: ValuePretrainConfig = Field(default_factory=ValuePretrainConfig, description="Value pretraining.")


class WarmStartConfig(Section):
    """Supervised start of the policy, as the paper starts from an SFT model."""

    enabled: bool = Field(False, description="Train on demonstrations before RL.")
    path: str | None = Field(
        None, description="JSONL with one `messages` list per row; empty takes the environment's own demonstrator."
    )
    demonstrations: int = Field(4000, ge=1, description="Conversations to take.")
    epochs: int = Field(2, ge=1, description="Passes over them.")
    batch_size: int = Field(64, ge=1, description="Conversations per optimizer step.")
    lr: float = Field(1e-3, gt=0, description="Peak learning rate (linear warm-up, cosine decay).")


class RolloutConfig(Section):
    """Generating rollouts."""

    workers: int = Field(1, ge=1, description="Rollout worker processes.")
    slots: int = Field(32, ge=1, description="Rollouts that one worker generates at a time.")
    threads: int = Field(0, ge=0, description="CPU threads per worker; 0 shares the cores between learner and workers.")
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:1`.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the learner scales logits by the same.")
    top_p: float = Field(1.0, description="Must be 1 for training: nucleus sampling multiplies every ratio.")
    top_k: int = Field(0, description="Must be 0 (off) for training, for the same reason.")
    max_turns: int = Field(8, ge=1, description="Turns of the policy per rollout.")
    max_action_tokens: int = Field(128, ge=1, description="Tokens sampled per rollout.")
    max_context_tokens: int = Field(
        512, ge=8, description="Prompt, actions and observations together; also the cache per slot."
    )
    on_swap: Literal["recompute", "keep"] = Field(
        "recompute",
        description="When new weights arrive mid-rollout: rebuild the KV cache under them, or keep the old one.",
    )
    step_timeout_s: float = Field(60.0, gt=0, description="Longest that an environment step may take.")
    rollout_timeout_s: float = Field(600.0, gt=0, description="Longest that a rollout may take; then it is truncated.")
    max_attempts: int = Field(3, ge=1, description="Attempts per request before it counts as exhausted.")
    restarts: int = Field(
        3,
        ge=0,
        description="Deaths of a worker within ten minutes that are answered by a new one; after that the run ends.",
    )
    lease_s: float = Field(30.0, gt=0, description="A worker that is silent for longer loses its rollouts to others.")
    flush_interval_s: float = Field(0.5, gt=0, description="Longest that a finished rollout waits to be written.")
    partial_after_s: float = Field(
        30.0,
        gt=0,
        description="What a running rollout has that is older than this is stored in parts, from which another worker "
        "goes on if this one dies; rollouts that take less time cost nothing.",
    )


class AsynchronyConfig(Section):
    """How far generation may run ahead of training."""

    enabled: bool = Field(True, description="Off: generate a batch, train on it, and only then generate the next.")
    run_ahead: int = Field(1, ge=0, description="Batches that may be in the making beyond the one that trains next.")
    max_token_age: int | None = Field(
        None, ge=1, description="Oldest token age, in updates; empty (recommended): no limit."
    )
    stale: Literal["mask", "reject"] = Field(
        "mask", description="What happens to tokens over that age, or to their rollout."
    )
    keep_policies: int | None = Field(
        8,
        ge=2,
        description="Newest policies kept in the store, besides those of checkpoints and evaluations; empty keeps all.",
    )
    watchdog_s: float = Field(600.0, gt=0, description="A run without any progress for this long ends with a message.")


class LearnerConfig(Section):
    """The update loop."""

    updates: int = Field(1000, ge=1, description="Updates (steps) to make.")
    batch_size: int = Field(128, ge=1, description="Rollouts per update. Paper: 128.")
    micro_batch_tokens: int = Field(8192, ge=1, description="Padded tokens per forward and backward pass.")
    threads: int = Field(0, ge=0, description="CPU threads; 0 shares the cores between learner and workers.")
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:0`.")
    zero_stage: int = Field(1, ge=0, le=3, description="DeepSpeed ZeRO stage of both engines.")
    checkpoint_every: int = Field(20, ge=1, description="Updates between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept.")
    record_tokens: Literal["none", "sample", "all"] = Field(
        "sample", description="Whose per-token values, advantages and ratios are stored with each update."
    )
    logprob_tolerance: float = Field(
        1e-3,
        gt=0,
        description="Largest mean gap between recorded and recomputed log-probabilities at the start (bf16: 0.03).",
    )


class EvaluationConfig(Section):
    """Measuring the policy on held-out prompts, in a process of its own."""

    every: int = Field(20, ge=0, description="Updates between evaluations; 0 evaluates only at start and end.")
    prompts: int = Field(128, ge=1, description="Held-out prompts.")
    samples_per_prompt: int = Field(1, ge=1, description="Sampled rollouts per prompt. Paper: 16 (BeyondAIME: 4).")
    greedy: bool = Field(True, description="Evaluate greedily as well.")
    temperature: float = Field(1.0, gt=0, description="Of the sampled rollouts. Paper: 1.")
    top_p: float = Field(1.0, gt=0, le=1, description="Share of the likeliest tokens drawn from. Paper: 1, all.")
    top_k: int = Field(0, ge=0, description="How many of the likeliest tokens are drawn from; 0: all, as in the paper.")
    suite: str | None = Field(None, description="Name of the tasks in metrics; empty takes the environment's.")
    alone: bool = Field(False, description="The run evaluates `model.path` and trains nothing; `sao evaluate` sets it.")

    @field_validator("suite")
    @classmethod
    def _suite_is_a_name(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or any(c in value for c in '/\\"\n\0')):
            raise ValueError(f"must be a plain name without slashes: got {value!r}")
        return value


class TrackingConfig(Section):
    """MLflow."""

    enabled: bool = Field(True, description="Log the run to MLflow.")
    experiment: str | None = Field(None, description="Experiment name; empty takes the recipe's.")
    study: str | None = Field(
        None,
        description="Name of the study that the run belongs to; its runs are grouped under one parent in MLflow.",
    )
    traces: int = Field(
        3,
        ge=0,
        description="How many of the best and of the worst sampled rollouts of each evaluation are shown in MLflow, as "
        "traces and pages; 0 shows none.",
    )

    @field_validator("study")
    @classmethod
    def _study_is_a_name(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or any(c in value for c in '"\n\0')):
            raise ValueError(f"must be a plain name without double quotes: got {value!r}")
        return value


class TrainConfig(Section):
    """A training run. A recipe is a YAML file of it."""

    recipe: str = Field("custom", description="Name under which runs are compared.")
    seed: int = Field(0, ge=0, description="Seed of model, data, sampling and evaluation.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The policy to start from.")
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, description="The tasks.")
    algorithm: AlgorithmConfig = Field(
        default_factory=AlgorithmConfig, description="How trajectories become gradients."
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="Optimising the policy.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The value model.")
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig, description="Supervised start.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generating rollouts.")
    asynchrony: AsynchronyConfig = Field(default_factory=AsynchronyConfig, description="Running ahead.")
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="The update loop.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Held-out measurement.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow.")

    @field_validator("recipe")
    @classmethod
    def _recipe_is_a_name(cls, value: str) -> str:
        if not value or any(c in value for c in "/\\\n"):
            raise ValueError(f"must be a plain name without slashes: got {value!r}")
        return value

    @model_validator(mode="after")
    def _training_samples_from_the_policy_itself(self) -> Self:
        if self.rollout.top_p != 1.0:
            raise ValueError(
                f"rollout.top_p must be 1 for training (other values multiply every ratio by the surviving mass): "
                f"got {self.rollout.top_p}; set rollout.top_p=1.0"
            )
        if self.rollout.top_k != 0:
            raise ValueError(
                f"rollout.top_k must be 0 (off) for training: got {self.rollout.top_k}; set rollout.top_k=0"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_can_fill(self) -> Self:
        from sao_core.algorithms import resolve

        group = resolve(self).group_size
        if self.learner.batch_size % group:
            raise ValueError(
                f"learner.batch_size must be a multiple of the group size {group}: got {self.learner.batch_size}"
            )
        a = self.asynchrony
        if a.enabled and a.max_token_age is not None and a.stale == "reject" and a.max_token_age <= a.run_ahead:
            raise ValueError(
                f"asynchrony.max_token_age must exceed asynchrony.run_ahead ({a.run_ahead}) when stale rollouts are "
                f"rejected, or a batch could never fill: got {a.max_token_age}; raise it, or set asynchrony.stale=mask"
            )
        if self.rollout.max_action_tokens >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_context_tokens must exceed rollout.max_action_tokens ({self.rollout.max_action_tokens}), "
                f"since the prompt counts too: got {self.rollout.max_context_tokens}"
            )
        return self

    @property
    def run_ahead(self) -> int:
        """Batches in the making beyond the next one; 0 when synchronous."""
        return self.asynchrony.run_ahead if self.asynchrony.enabled else 0

    @property
    def suite(self) -> str:
        """What its evaluations are called in metrics."""
        return self.evaluation.suite or self.environment.name

    @property
    def outstanding(self) -> int:
        """Rollouts for training that may be in the making or ready at a time."""
        return (self.run_ahead + 1) * self.learner.batch_size


def parse_config(values: Mapping[str, Any]) -> TrainConfig:
    """Build a :class:`TrainConfig`, raising :class:`ConfigError` with one clear line."""
    try:
        return TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(explain(error, TrainConfig)) from None
