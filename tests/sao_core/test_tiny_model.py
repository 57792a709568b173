import json

import pytest
import torch

from sao_core.environments.arithmetic import MalformedExpression, evaluate
from sao_core.environments.calculator import (
    INSTRUCTIONS,
    OPENINGS,
    WORDS,
    CalculatorOptions,
    demonstrations,
)
from sao_core.models.policy import load_policy, load_tokenizer
from sao_core.models.tiny import build_tiny, build_tokenizer
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Role


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny(folder, seed=0)
    return folder


def weights(folder):
    return load_policy(folder).state_dict()


def test_it_is_a_mixture_of_experts_of_the_promised_size(folder):
    model = load_policy(folder)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert 300_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 2_000_000
    assert model.config.num_experts == 4
    assert model.config.num_experts_per_tok == 2
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 256, 64)


def test_the_seed_decides_the_weights(folder, tmp_path):
    for name, seed in (("same", 0), ("other", 1)):
        build_tiny(tmp_path / name, seed)
    name = "model.layers.1.self_attn.q_proj.weight"
    first, same, other = (weights(f)[name] for f in (folder, tmp_path / "same", tmp_path / "other"))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_building_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build_tiny(tmp_path / "tiny", seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_the_folder_is_an_ordinary_one(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.parametrize(
    "text", ["calc: 7*3-4", "héllo wörld 🎉", "  a  b\n\tc ", "x:  y", "answer:12", "12345", "<|user |>", "\u2028"]
)
def test_any_text_survives_encoding(folder, text):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("calc: 120*3") == ["calc:Ġ", "1", "2", "0", "*", "3"]


def test_the_words_of_the_calculator_are_single_tokens():
    tokenizer = build_tokenizer()
    question = " ".join([OPENINGS[0], *(f"7 {word}" for word in WORDS.values()), "7"])
    assert len(tokenizer.tokenize(question)) == 1 + 2 * len(WORDS) + 1
    for opening in OPENINGS:
        assert len(tokenizer.tokenize(f"{opening} 7")) == 2
    errors = ["error: write calc: or answer:", *map(error_of, ("1 1", "1+", "x", "(1", "1" * 99))]
    for text in (*errors, INSTRUCTIONS):
        words = len(text.replace("`", " ` ").replace(".", " . ").replace(",", " , ").split())
        assert len(tokenizer.tokenize(text)) <= words + 12


def error_of(expression):
    with pytest.raises(MalformedExpression) as caught:
        evaluate(expression)
    return f"error: {caught.value}"


def test_the_template_extends_history_and_ends_turns_with_a_token_of_its_own(folder):
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    assert renderer.extends_history
    assert renderer.stop_ids == {tokenizer.convert_tokens_to_ids("<|end|>")}
    assert tokenizer.pad_token_id not in renderer.stop_ids


def test_a_conversation_is_rendered_as_expected(folder):
    tokenizer = load_tokenizer(folder)
    ids = Renderer(tokenizer).prompt_ids([Message(Role.SYSTEM, "a"), Message(Role.USER, "find 2 plus 3")])
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<|system|>", "a", "<|end|>"),
        *("<|user|>", "findĠ", "2", "ĠplusĠ", "3", "<|end|>"),
        "<|assistant|>",
    ]


def test_demonstrated_rollouts_are_short(folder):
    renderer = Renderer(load_tokenizer(folder))
    lengths, actions = [], []
    for messages in demonstrations(CalculatorOptions(), 0, 200):
        ids, mask = renderer.conversation(messages)
        lengths.append(len(ids))
        actions.append(sum(mask))
    assert max(lengths) <= 40
    assert max(actions) <= 24
