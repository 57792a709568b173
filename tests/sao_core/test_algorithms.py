import fnmatch
import subprocess
import sys
from typing import Any, get_args

import pytest

from sao_core.algorithms import MLP_PROJECTIONS, PRESETS, Advantage, Objective, describe_objective, preset, resolve
from sao_core.config import AlgorithmName, ConfigError, TrainConfig, parse_config

GAE, DIS, PPO = Advantage.SKIP_OBSERVATION_GAE, Objective.DIS, Objective.PPO_CLIP


@pytest.mark.parametrize(
    ("name", "group", "advantage", "objective", "updates", "is_frozen", "window"),
    [
        ("sao", 1, GAE, DIS, 2, True, None),
        ("sao-single-update", 1, GAE, DIS, 1, True, None),
        ("sao-full-critic", 1, GAE, DIS, 2, False, None),
        ("sao-dis-only", 1, GAE, DIS, 1, False, None),
        ("sao-step-mean", 1, Advantage.STEP_MEAN, DIS, 2, True, None),
        ("sao-step-last", 1, Advantage.STEP_LAST, DIS, 2, True, None),
        ("vapo", 1, GAE, PPO, 1, False, None),
        ("grpo", 8, Advantage.GROUP_RELATIVE, PPO, 0, False, None),
        ("grpo-dis", 8, Advantage.GROUP_RELATIVE, DIS, 0, False, None),
        ("running-mean", 1, Advantage.RUNNING_MEAN, DIS, 0, False, 8),
        ("running-mean-global", 1, Advantage.RUNNING_MEAN_GLOBAL, DIS, 0, False, 128),
    ],
)
def test_presets_are_the_rows_of_the_papers_tables(
    name: str,
    group: int,
    advantage: Advantage,
    objective: Objective,
    updates: int,
    is_frozen: bool,
    window: int | None,
) -> None:
    algorithm = resolve(parse_config({"algorithm": {"name": name}, "learner": {"batch_size": 64}}))
    assert (algorithm.name, algorithm.group_size, algorithm.advantage) == (name, group, advantage)
    assert (algorithm.objective, algorithm.critic_updates, algorithm.window) == (objective, updates, window)
    assert algorithm.critic_trainable == (MLP_PROJECTIONS if is_frozen else None)
    assert algorithm.has_critic == advantage.needs_critic == (updates > 0)


def test_every_name_that_a_configuration_may_give_is_a_preset() -> None:
    assert tuple(PRESETS) == get_args(AlgorithmName)


def test_an_unknown_algorithm_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown algorithm.name `gpro`; did you mean `grpo`\?"):
        preset("gpro")


def test_overrides_replace_what_the_preset_says() -> None:
    config = parse_config(
        {
            "algorithm": {"name": "sao", "group_size": 4},
            "critic": {"updates_per_batch": 3, "trainable": ["*.mlp.*", "*norm*"]},
        }
    )
    algorithm = resolve(config)
    assert (algorithm.group_size, algorithm.critic_updates) == (4, 3)
    assert algorithm.critic_trainable == ("*.mlp.*", "*norm*")
    windowed = parse_config({"algorithm": {"name": "running-mean", "running_mean_window": 3}})
    assert resolve(windowed).window == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"algorithm": {"name": "grpo"}, "critic": {"updates_per_batch": 2}},
            "critic.updates_per_batch must be left empty, since algorithm.name=grpo has no critic: got 2; leave it "
            "out, or choose an algorithm with a critic: sao, ",
        ),
        (
            {"algorithm": {"name": "running-mean"}, "critic": {"trainable": ["*"]}},
            r"critic.trainable must be left empty, since algorithm.name=running-mean has no critic: got \('\*',\)",
        ),
        (
            {"algorithm": {"name": "sao", "running_mean_window": 8}},
            "algorithm.running_mean_window must be left empty, since algorithm.name=sao keeps no running mean: got 8",
        ),
        (
            {"algorithm": {"name": "grpo-dis", "group_size": 1}},
            "algorithm.group_size must be at least 2 for algorithm.name=grpo-dis",
        ),
    ],
)
def test_an_override_that_does_not_fit_is_refused_with_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


@pytest.mark.parametrize(
    ("parameter", "trains"),
    [
        ("layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.11.mlp.experts.down_proj", True),
        ("layers.0.mlp.shared_expert.up_proj.weight", True),
        ("layers.3.mlp.gate_proj.weight", True),
        ("layers.3.mlp.up_proj.weight", True),
        ("model.layers.3.mlp.down_proj.weight", True),
        ("layers.0.mlp.gate.weight", False),
        ("layers.0.mlp.shared_expert_gate.weight", False),
        ("layers.0.self_attn.q_proj.weight", False),
        ("layers.0.self_attn.o_proj.bias", False),
        ("layers.0.self_attn.q_norm.weight", False),
        ("layers.0.input_layernorm.weight", False),
        ("norm.weight", False),
        ("embed_tokens.weight", False),
    ],
)
def test_frozen_attention_trains_mlp_and_expert_projections_only(parameter: str, trains: bool) -> None:
    assert any(fnmatch.fnmatch(parameter, pattern) for pattern in MLP_PROJECTIONS) is trains


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"name": "sao"}, "keeps ratios in (0.70, 6.00)"),
        ({"name": "sao", "eps_low": 0.8, "eps_high": 3.0}, "keeps ratios in (0.20, 4.00)"),
        ({"name": "vapo"}, "clips ratios to [0.80, 1.28]"),
    ],
)
def test_epsilons_are_shown_as_the_bounds_that_they_mean(algorithm: dict[str, Any], text: str) -> None:
    config = TrainConfig.model_validate({"algorithm": algorithm})
    assert describe_objective(resolve(config), config.algorithm) == text


def test_algorithms_are_known_without_torch() -> None:
    code = "import sys, sao_core.algorithms; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
