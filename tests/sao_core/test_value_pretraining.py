"""Value pretraining: the critic learns what can be learned, and what goes on is the best of it, frozen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fixtures import build_model_folder, make_batch, make_config, make_trajectory

from sao_core.config import ConfigError
from sao_core.learner import Learner
from sao_core.protocols import Rollout
from sao_core.trajectory import Outcome
from sao_core.value_pretraining import pretrain_value, split

PRETRAIN = {"max_epochs": 12, "patience": 3, "minibatch_rollouts": 16, "lr": 3e-3}


def _predictable(count: int, seed: int = 0) -> list[Rollout]:
    """Rollouts whose reward follows from the first word of the prompt; prompts differ in their other words."""
    random = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for number in range(count):
        word = int(random.integers(2, 12))
        ids = [word, *random.integers(20, 60, size=int(random.integers(4, 9)))]
        mask = [False, False] + [True] * (len(ids) - 2)
        rollouts.append((make_trajectory(number, ids, mask, float(word % 2)),))
    return rollouts


def test_critic_learns_a_reward_that_follows_from_the_prompt(tmp_path: Path) -> None:
    config = make_config(critic={"pretrain": PRETRAIN})
    learner = Learner(config, build_model_folder(tmp_path / "policy"), seed=0, device="cpu")
    before = learner.critic.engine.state_dict()
    epochs: list[tuple[int, float | None]] = []
    metrics = pretrain_value(learner, _predictable(320), config, lambda *report: epochs.append(report))
    assert metrics["value_pretrain/explained_variance"] >= 0.8
    after = learner.critic.engine.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in after), "all parameters train here"
    assert [epoch for epoch, _ in epochs] == list(range(1, int(metrics["value_pretrain/epochs"]) + 1))
    assert metrics["value_pretrain/rollouts"] + metrics["value_pretrain/held_out_rollouts"] == 320


def test_critic_goes_on_learning_with_its_attention_frozen(tmp_path: Path) -> None:
    config = make_config(critic={"lr": 5e-3}, policy={"first_update_step": 100})
    learner = Learner(config, build_model_folder(tmp_path / "policy"), seed=0, device="cpu")
    explained = []
    for step in range(1, 31):
        metrics = learner.update_value(make_batch(_predictable(64, seed=step), step), {1: 0})
        explained.append(metrics["value/explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert np.mean(explained[-3:]) >= 0.8


def test_best_weights_go_on_with_a_frozen_critic_and_a_fresh_optimizer(tmp_path: Path) -> None:
    config = make_config(critic={"pretrain": {**PRETRAIN, "lr": 0.3, "max_epochs": 8, "patience": 8}})
    learner = Learner(config, build_model_folder(tmp_path / "policy"), seed=0, device="cpu")
    rollouts = _predictable(96)
    epochs: list[float | None] = []
    metrics = pretrain_value(learner, rollouts, config, lambda _, explained: epochs.append(explained))
    best = metrics["value_pretrain/explained_variance"]
    assert best == max(e for e in epochs if e is not None)
    assert epochs[-1] != best, "a learning rate this high should not end on its best epoch"
    held = learner.prepare(split(rollouts, 0.2, config.seed)[1])
    values, _ = learner.critic.values(held)
    returns, mask = learner.critic.targets(held, None), held.rows.action_mask
    errors = (returns - values)[mask].double()
    assert 1 - float(errors.var(correction=0) / returns[mask].double().var(correction=0)) == pytest.approx(
        best, abs=1e-5
    )
    assert learner.critic.engine.updates == 0
    trainable = [name for name, p in learner.critic.engine.module.named_parameters() if p.requires_grad]
    assert not [name for name in trainable if "attn" in name or "embed" in name or "norm" in name]
    assert learner.critic.engine.lr == config.critic.lr


def test_training_stops_when_nothing_improves(tmp_path: Path) -> None:
    config = make_config(critic={"pretrain": {**PRETRAIN, "max_epochs": 50, "patience": 2}})
    learner = Learner(config, build_model_folder(tmp_path / "policy"), seed=0, device="cpu")
    coins = np.random.default_rng(1).integers(0, 2, size=60)
    rollouts = [(make_trajectory(i, [2 + i % 50, 6, 7], [False, True, True], float(c)),) for i, c in enumerate(coins)]
    metrics = pretrain_value(learner, rollouts, config)
    assert metrics["value_pretrain/epochs"] == metrics["value_pretrain/best_epoch"] + 2 < 50


def test_equal_rewards_leave_explained_variance_undefined(tmp_path: Path) -> None:
    config = make_config(critic={"pretrain": PRETRAIN})
    learner = Learner(config, build_model_folder(tmp_path / "policy"), seed=0, device="cpu")
    rollouts = [(make_trajectory(i, [5, 6, 7], [False, True, True], 1.0),) for i in range(20)]
    seen: list[float | None] = []
    metrics = pretrain_value(learner, rollouts, config, lambda _, explained: seen.append(explained))
    assert "value_pretrain/explained_variance" not in metrics
    assert seen == [None] * PRETRAIN["patience"]


def test_prompts_are_held_out_whole_and_by_seed() -> None:
    rollouts = [(make_trajectory(i, [5, 6], [False, True], 1.0, prompt_key=f"p{i // 4}"),) for i in range(40)]
    train, held = split(rollouts, 0.2, seed=0)
    assert {r[0].prompt_key for r in train}.isdisjoint(r[0].prompt_key for r in held)
    assert (len(train), len(held)) == (32, 8)
    assert split(rollouts, 0.2, seed=0) == (train, held)
    assert split(rollouts, 0.2, seed=1)[1] != held


def test_failed_rollouts_teach_nothing_and_too_few_are_an_error(tmp_path: Path) -> None:
    config = make_config(critic={"pretrain": PRETRAIN})
    learner = Learner(config, build_model_folder(tmp_path / "policy"), seed=0, device="cpu")
    rollouts = [(make_trajectory(i, [5, 6], [False, True], 0.0, outcome=Outcome.FAILED),) for i in range(9)]
    with pytest.raises(ConfigError, match="got 0 usable rollouts of 0 prompts"):
        pretrain_value(learner, rollouts, config)
