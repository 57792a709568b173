"""Adapters train in the learner; what leaves it is an ordinary model that computes the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_fixtures import build_model_folder, make_batch, make_config, random_rollouts
from transformers import AutoModelForCausalLM

from sao_core.config import ConfigError
from sao_core.learner import Learner

LORA = {"policy": {"lora": {"rank": 4, "alpha": 8}}}


def _learner(folder: Path, **sections: dict[str, Any]) -> Learner:
    return Learner(make_config(**{**LORA, **sections}), folder, seed=0, device="cpu")


def _step(learner: Learner, step: int) -> None:
    learner.update_value(make_batch(random_rollouts(6, seed=step), step), {1: 0})
    learner.update_policy()


def test_only_adapters_train(tmp_path: Path) -> None:
    learner = _learner(build_model_folder(tmp_path / "policy", moe=False))
    before = learner.policy.engine.state_dict()
    _step(learner, 1)
    after = learner.policy.engine.state_dict()
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("lora_B" in name or "lora_A" in name for name in moved)


def test_fresh_adapters_leave_the_policy_as_it_is(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "policy", moe=False)
    rollouts = random_rollouts(4)
    plain = Learner(make_config(), folder, device="cpu")
    adapted = _learner(folder)
    assert torch.equal(
        plain.policy.logprobs(plain.prepare(rollouts)), adapted.policy.logprobs(adapted.prepare(rollouts))
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_the_published_folder_is_the_merged_model(tmp_path: Path, stage: int) -> None:
    folder = build_model_folder(tmp_path / "policy", moe=False)
    learner = _learner(folder, learner={"zero_stage": stage})
    for step in (1, 2):
        _step(learner, step)
    learner.save_policy(tmp_path / "published")
    names = {name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    assert {name for name, _ in published.named_parameters()} == names
    rollouts = random_rollouts(4, seed=9)
    again = Learner(make_config(), tmp_path / "published", device="cpu")
    ours, theirs = (who.policy.logprobs(who.prepare(rollouts)) for who in (learner, again))
    assert not torch.equal(ours, Learner(make_config(), folder, device="cpu").policy.logprobs(again.prepare(rollouts)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    learner = _learner(build_model_folder(tmp_path / "policy", moe=False))
    _step(learner, 1)
    learner.save_checkpoint(tmp_path / "checkpoint", {"step": 1, "version": 1})
    _step(learner, 2)
    resumed = _learner(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    _step(resumed, 2)
    state = resumed.policy.engine.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in learner.policy.engine.state_dict().items())


def test_targets_that_fit_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.lora\.targets does not fit the model: .*no_such_layer"):
        _learner(build_model_folder(tmp_path / "policy", moe=False), policy={"lora": {"targets": ["no_such_layer"]}})


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'sao-pipeline\[lora\]'"):
        _learner(build_model_folder(tmp_path / "policy", moe=False))
