"""The policy on disk: saved folders load both ways, swaps are in place, and bad folders get one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from learner_fixtures import build_model_folder
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from sao_core.config import ConfigError
from sao_core.models.policy import load_policy, load_tokenizer, load_weights, resolve_device, save_policy


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("moe", [True, False])
def test_saved_folder_loads_by_transformers_and_by_swap(tmp_path: Path, moe: bool) -> None:
    first = build_model_folder(tmp_path / "first", seed=1, moe=moe)
    second = build_model_folder(tmp_path / "second", seed=2, moe=moe)
    by_transformers = AutoModelForCausalLM.from_pretrained(second)
    model = load_policy(first)
    load_weights(model, second)
    _assert_same(_weights(model), _weights(by_transformers))


def test_moe_weights_are_stored_under_the_names_other_engines_read(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = build_model_folder(tmp_path / "policy")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in set(file.keys())


def test_fused_expert_names_load_too(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "policy", seed=1)
    model = load_policy(folder)
    expected = _weights(model)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    load_weights(model, tmp_path / "fused")
    _assert_same(_weights(model), expected)


def test_swap_keeps_storage_and_dtype(tmp_path: Path) -> None:
    first = build_model_folder(tmp_path / "first", seed=1)
    second = build_model_folder(tmp_path / "second", seed=2)
    model = load_policy(first, "bfloat16")
    pointers = [p.data_ptr() for p in model.parameters()]
    load_weights(model, second)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    _assert_same(_weights(model), _weights(load_policy(second, torch.bfloat16)))


def test_swap_refuses_another_architecture_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = load_policy(build_model_folder(tmp_path / "first"))
    before = _weights(model)
    for other in (
        build_model_folder(tmp_path / "wider", hidden=64),
        build_model_folder(tmp_path / "dense", moe=False),
    ):
        with pytest.raises(ConfigError):
            load_weights(model, other)
        _assert_same(_weights(model), before)


def test_gathered_state_replaces_the_models_own_weights_on_save(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "first")
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    save_policy(model, tokenizer, tmp_path / "doubled", doubled)
    saved = dict(load_policy(tmp_path / "doubled").named_parameters())
    assert all(torch.equal(saved[name], tensor) for name, tensor in doubled.items())
    assert load_tokenizer(tmp_path / "doubled").chat_template == tokenizer.chat_template


def test_bad_folders_are_named_with_what_they_lack(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_policy(tmp_path / "empty")
    good = build_model_folder(tmp_path / "good")
    shutil.copytree(good, tmp_path / "unweighted")
    (tmp_path / "unweighted" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_policy(tmp_path / "unweighted")
    with pytest.raises(ConfigError, match="dtype"):
        load_policy(good, "int32")


def test_folder_that_lacks_weights_is_refused_instead_of_filled_at_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = build_model_folder(tmp_path / "policy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, first model\.norm\.weight"):
        load_policy(folder)


def test_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="no causal LM but BertForMaskedLM"):
        load_policy(tmp_path / "bert")


def test_tokenizer_without_chat_template_is_refused(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "policy")
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(folder)


def test_device_names() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="must be `auto`"):
        resolve_device("toaster")
    with pytest.raises(ConfigError, match="is not there"):
        resolve_device("cuda:99")
