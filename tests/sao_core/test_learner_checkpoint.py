"""A learner's checkpoint is complete: what goes on from it is, bit by bit, what would have gone on without it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fixtures import build_model_folder, make_batch, make_config, random_rollouts
from transformers import AutoModelForCausalLM, AutoTokenizer

from sao_core.config import ConfigError
from sao_core.learner import Learner
from sao_core.models.critic import Critic
from sao_core.random_state import load_random_state, save_random_state, seed_all


def _learner(folder: Path, **sections: dict[str, Any]) -> Learner:
    return Learner(make_config(**sections), folder, seed=0, device="cpu")


def _steps(learner: Learner, first: int, last: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in range(first, last + 1):
        metrics = (
            learner.update_value(make_batch(random_rollouts(6, seed=step), step), {1: 0}) | learner.update_policy()
        )
    return metrics


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, stage: int) -> None:
    sections = {"learner": {"zero_stage": stage}, "critic": {"lr_warmup_steps": 10}, "policy": {"lr_warmup_steps": 5}}
    learner = _learner(build_model_folder(tmp_path / "policy"), **sections)
    _steps(learner, 1, 2)
    learner.save_checkpoint(tmp_path / "checkpoint", {"step": 2, "version": 7})
    expected = _steps(learner, 3, 4)
    resumed = _learner(tmp_path / "checkpoint", **sections)
    assert resumed.critic_pretrained
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == {"step": 2, "version": 7}
    assert _steps(resumed, 3, 4) == expected
    for ours, theirs in ((learner.policy, resumed.policy), (learner.critic, resumed.critic)):
        state = theirs.engine.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in ours.engine.state_dict().items())


def test_learning_rates_of_the_present_configuration_take_effect(tmp_path: Path) -> None:
    learner = _learner(build_model_folder(tmp_path / "policy"), critic={"lr": 1e-3, "lr_warmup_steps": 10})
    _steps(learner, 1, 2)
    assert learner.learning_rates == pytest.approx({"policy": 1e-3, "critic": 5e-4})
    learner.save_checkpoint(tmp_path / "checkpoint")
    resumed = _learner(tmp_path / "checkpoint", critic={"lr": 1e-2, "lr_warmup_steps": 10}, policy={"lr": 1e-4})
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.learning_rates == pytest.approx({"policy": 1e-4, "critic": 5e-3})
    metrics = _steps(resumed, 3, 3)
    assert (metrics["policy/lr"], metrics["value/lr"]) == pytest.approx((1e-4, 5e-3))


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoint_is_a_model_folder_with_its_critic(tmp_path: Path, stage: int) -> None:
    learner = _learner(build_model_folder(tmp_path / "policy"), learner={"zero_stage": stage})
    assert not learner.critic_pretrained
    _steps(learner, 1, 2)
    learner.save_checkpoint(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    trained = {name.removeprefix("policy."): t for name, t in learner.policy.engine.state_dict().items()}
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").chat_template
    critic = Critic.load(tmp_path / "checkpoint" / "critic", "float32", "cpu")
    trained = learner.critic.engine.state_dict()
    assert all(torch.equal(p, trained[name]) for name, p in critic.named_parameters())


def test_checkpoint_of_another_sharding_is_refused(tmp_path: Path) -> None:
    learner = _learner(build_model_folder(tmp_path / "policy"))
    learner.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"'learner\.zero_stage': 1}; resume with the same: got .*: 2}"):
        _learner(tmp_path / "checkpoint", learner={"zero_stage": 2}).load_checkpoint(tmp_path / "checkpoint")


def test_run_without_a_critic_checkpoints_its_policy_alone(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "policy")
    learner = _learner(folder, algorithm={"name": "running-mean"})
    assert learner.critic_pretrained, "there is nothing to pretrain"
    _steps(learner, 1, 2)
    learner.save_checkpoint(tmp_path / "checkpoint", {"step": 2})
    resumed = _learner(tmp_path / "checkpoint", algorithm={"name": "running-mean"})
    assert resumed.load_checkpoint(tmp_path / "checkpoint") == {"step": 2}
    assert _steps(resumed, 3, 3) == _steps(learner, 3, 3)


def test_random_states_of_python_numpy_and_torch_are_restored(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))

    seed_all(3)
    first = draw()
    save_random_state(tmp_path)
    expected = [draw() for _ in range(3)]
    load_random_state(tmp_path)
    assert [draw() for _ in range(3)] == expected
    seed_all(3)
    assert draw() == first
