"""The critic: where its values are read, what is frozen, and its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_fixtures import build_model_folder

from sao_core.algorithms import PRESETS
from sao_core.config import ConfigError
from sao_core.models.critic import Critic, at_previous, freeze, save_critic
from sao_core.models.policy import load_policy


def _critic(folder: Path, dtype: str = "float32") -> Critic:
    critic = Critic.from_policy(folder, dtype, "cpu")
    torch.manual_seed(5)
    critic.head.weight.data.normal_()
    return critic


def test_at_previous_moves_each_position_to_the_token_behind_it() -> None:
    assert at_previous(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist() == [[0, 1, 2], [0, 4, 5]]


def test_value_of_a_token_is_read_one_position_before_it(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    changed = torch.tensor([[5, 6, 7, 30, 9]])
    values, following = critic(ids)
    other, _ = critic(changed)
    assert torch.equal(values[0, :4], other[0, :4]), "V_3 may not know which token was chosen at 3"
    assert not torch.allclose(values[0, 4], other[0, 4]), "V_4 must have read token 3"
    assert torch.equal(values[0, 1:], following[0, :-1])
    hidden = critic.model(input_ids=ids).last_hidden_state
    expected = (hidden[0, 2] @ critic.head.weight[0] + critic.head.bias[0]).item()
    assert values[0, 3].item() == pytest.approx(expected, rel=1e-5)


def test_values_start_at_zero(tmp_path: Path) -> None:
    critic = Critic.from_policy(build_model_folder(tmp_path / "policy"), "float32", "cpu")
    values, following = critic(torch.tensor([[3, 4, 5]]))
    assert values.tolist() == [[0, 0, 0]]
    assert following.tolist() == [[0, 0, 0]]


def test_backbone_starts_with_the_policys_weights(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "policy")
    critic, policy = Critic.from_policy(folder, "float32", "cpu"), load_policy(folder)
    backbone = dict(policy.base_model.named_parameters())
    names = [name for name, _ in critic.model.named_parameters()]
    assert names == list(backbone)
    assert all(torch.equal(p, backbone[name]) for name, p in critic.model.named_parameters())


def test_padding_on_the_right_changes_no_value(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    alone, _ = critic(torch.tensor([[5, 6, 7]]))
    padded, _ = critic(torch.tensor([[5, 6, 7, 0, 0, 0], [9, 8, 7, 6, 5, 4]]))
    torch.testing.assert_close(padded[:1, :3], alone, rtol=1e-5, atol=1e-6)


def test_head_computes_in_float32_behind_a_bfloat16_backbone(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"), "bfloat16")
    values, _ = critic(torch.tensor([[5, 6, 7]]))
    assert values.dtype == torch.float32
    hidden = critic.model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    expected = (hidden[0, 1].float() @ critic.head.weight[0] + critic.head.bias[0]).item()
    assert values[0, 2].item() == pytest.approx(expected, rel=1e-5)


def test_attention_router_embeddings_and_norms_are_frozen_by_default(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    freeze(critic, PRESETS["sao"].critic_trainable)
    trainable = {name for name, p in critic.named_parameters() if p.requires_grad}
    layers = {f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")}
    assert trainable == layers | {"head.weight", "head.bias"}


def test_dense_models_train_their_mlp_in_place_of_experts(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy", moe=False))
    freeze(critic, PRESETS["sao"].critic_trainable)
    trainable = {name for name, p in critic.named_parameters() if p.requires_grad and not name.startswith("head")}
    assert trainable == {f"model.layers.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in ("gate", "up", "down")}


def test_none_trains_everything(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    freeze(critic, PRESETS["sao"].critic_trainable)
    freeze(critic, None)
    assert all(p.requires_grad for p in critic.parameters())


def test_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    with pytest.raises(ConfigError, match=r"'\*\.ffn\.\*' matches no parameter"):
        freeze(critic, ["*.mlp.*_proj*", "*.ffn.*"])


def test_training_nothing_but_the_head_is_an_error(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    for patterns in (["head.*"], []):
        with pytest.raises(ConfigError, match="nothing to train but the head"):
            freeze(critic, patterns)


def test_saved_critic_loads_with_the_same_values(tmp_path: Path) -> None:
    critic = _critic(build_model_folder(tmp_path / "policy"))
    save_critic(critic, tmp_path / "critic")
    loaded = Critic.load(tmp_path / "critic", "float32", "cpu")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids)[0], critic(ids)[0])
    with pytest.raises(ConfigError, match="holds no critic"):
        Critic.load(tmp_path / "policy", "float32", "cpu")
