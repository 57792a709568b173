"""The algorithms of the paper's tables: advantage × objective × critic schedule × group size.

A preset is a row of that table; :func:`resolve` applies what a configuration overrides and refuses
what does not fit. Knows no tensors, so that a flow can ask without loading torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from sao_core.config import ConfigError, nearest

if TYPE_CHECKING:
    from sao_core.config import AlgorithmConfig, TrainConfig


class Advantage(StrEnum):
    """Where the advantage of an action token comes from."""

    SKIP_OBSERVATION_GAE = "skip_observation_gae"
    """Token-level GAE that goes from an action's last token straight to the next action's first."""
    STEP_MEAN = "step_mean"
    """GAE over actions; an action's value is the mean of its tokens' values."""
    STEP_LAST = "step_last"
    """GAE over actions; an action's value is its last token's."""
    GROUP_RELATIVE = "group_relative"
    """(score − mean) / std over the rollouts of one prompt."""
    RUNNING_MEAN = "running_mean"
    """Score − mean of the prompt's earlier scores."""
    RUNNING_MEAN_GLOBAL = "running_mean_global"
    """Score − mean of the run's earlier scores."""

    @property
    def needs_critic(self) -> bool:
        """Whether values enter the advantage."""
        return self in (Advantage.SKIP_OBSERVATION_GAE, Advantage.STEP_MEAN, Advantage.STEP_LAST)

    @property
    def needs_history(self) -> bool:
        """Whether earlier scores enter the advantage."""
        return self in (Advantage.RUNNING_MEAN, Advantage.RUNNING_MEAN_GLOBAL)


class Objective(StrEnum):
    """What turns advantages into a policy gradient."""

    DIS = "dis"
    """Direct double-sided importance sampling against the recorded log-probabilities."""
    PPO_CLIP = "ppo_clip"
    """Clipped ratio to the latest trainer policy, which leaves staleness uncorrected."""


MLP_PROJECTIONS = ("*.mlp.*_proj*",)
"""Parameters of the critic that train while attention is frozen: MoE and MLP projections. The router
(`mlp.gate.weight`), attention, norms and embeddings do not match."""


@dataclass(frozen=True)
class Algorithm:
    """One row of the table (ALGORITHM: paper's tables and ablations)."""

    name: str
    group_size: int
    """Rollouts per prompt; a group is complete or not trained on."""
    advantage: Advantage
    objective: Objective
    critic_updates: int
    """K, critic updates per policy update; 0 = there is no critic."""
    critic_trainable: tuple[str, ...] | None
    """Patterns (fnmatch) of the critic's parameters that train during RL; None = all of them."""
    window: int | None = None
    """Earlier scores that a running mean looks back on; None for the other advantages."""

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.critic_updates > 0


def _with_critic(
    name: str,
    *,
    advantage: Advantage = Advantage.SKIP_OBSERVATION_GAE,
    objective: Objective = Objective.DIS,
    updates: int = 2,
    trainable: tuple[str, ...] | None = MLP_PROJECTIONS,
) -> Algorithm:
    return Algorithm(name, 1, advantage, objective, updates, trainable)


def _without_critic(
    name: str, *, advantage: Advantage, objective: Objective = Objective.DIS, group: int = 1, window: int | None = None
) -> Algorithm:
    return Algorithm(name, group, advantage, objective, 0, None, window)


PRESETS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        _with_critic("sao"),
        _with_critic("sao-single-update", updates=1),
        _with_critic("sao-full-critic", trainable=None),
        _with_critic("sao-dis-only", updates=1, trainable=None),
        _with_critic("sao-step-mean", advantage=Advantage.STEP_MEAN),
        _with_critic("sao-step-last", advantage=Advantage.STEP_LAST),
        _with_critic("vapo", objective=Objective.PPO_CLIP, updates=1, trainable=None),
        _without_critic("grpo", advantage=Advantage.GROUP_RELATIVE, objective=Objective.PPO_CLIP, group=8),
        _without_critic("grpo-dis", advantage=Advantage.GROUP_RELATIVE, group=8),
        _without_critic("running-mean", advantage=Advantage.RUNNING_MEAN, window=8),
        _without_critic("running-mean-global", advantage=Advantage.RUNNING_MEAN_GLOBAL, window=128),
    )
}
"""Every preset by its name."""


def preset(name: str) -> Algorithm:
    """The preset of that name; raises :class:`ConfigError` with the nearest name otherwise."""
    if name not in PRESETS:
        raise ConfigError(f"unknown algorithm.name `{name}`{nearest(name, list(PRESETS))}")
    return PRESETS[name]


def resolve(config: TrainConfig) -> Algorithm:
    """The configured algorithm: its preset with what the configuration overrides.

    Raises :class:`ConfigError` for an override that the preset has no use for, or that would leave
    nothing to learn from.
    """
    base = preset(config.algorithm.name)
    critic = config.critic
    for setting, value in (
        ("critic.updates_per_batch", critic.updates_per_batch),
        ("critic.trainable", critic.trainable),
    ):
        if value is not None and not base.has_critic:
            names = ", ".join(name for name, algorithm in PRESETS.items() if algorithm.has_critic)
            raise ConfigError(
                f"{setting} must be left empty, since algorithm.name={base.name} has no critic: got {value!r}; "
                f"leave it out, or choose an algorithm with a critic: {names}"
            )
    window = config.algorithm.running_mean_window
    if window is not None and not base.advantage.needs_history:
        raise ConfigError(
            f"algorithm.running_mean_window must be left empty, since algorithm.name={base.name} keeps no running "
            f"mean: got {window}; leave it out, or choose running-mean or running-mean-global"
        )
    group = config.algorithm.group_size
    if group == 1 and base.advantage is Advantage.GROUP_RELATIVE:
        raise ConfigError(
            f"algorithm.group_size must be at least 2 for algorithm.name={base.name}, since a rollout is compared with "
            f"the others of its group: got 1; leave it out for {base.group_size}"
        )
    return dataclasses.replace(
        base,
        group_size=base.group_size if group is None else group,
        critic_updates=base.critic_updates if critic.updates_per_batch is None else critic.updates_per_batch,
        critic_trainable=base.critic_trainable if critic.trainable is None else critic.trainable,
        window=base.window if window is None else window,
    )


def describe_objective(algorithm: Algorithm, settings: AlgorithmConfig) -> str:
    """What the policy loss keeps, as bounds of the ratio, since ε is a distance from 1.

    `keeps ratios in (0.70, 6.00)` for DIS with ε = (0.3, 5.0).
    """
    if algorithm.objective is Objective.DIS:
        return f"keeps ratios in ({1 - settings.eps_low:.2f}, {1 + settings.eps_high:.2f})"
    return f"clips ratios to [{1 - settings.ppo_eps_low:.2f}, {1 + settings.ppo_eps_high:.2f}]"
