"""Chunked log-probabilities against the plain formulation, and the memory they may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_fixtures import build_model_folder
from torch import Tensor

from sao_core.models.logprobs import TokenScorer, token_logprobs
from sao_core.models.policy import load_policy

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0]]).bool()


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_scores_are_those_of_the_whole_softmax_at_the_previous_position(tmp_path: Path, chunk: int) -> None:
    policy = load_policy(build_model_folder(tmp_path / "policy"))
    policy.requires_grad_(False)
    logprobs, entropy = TokenScorer(policy, temperature=0.7, chunk_tokens=chunk)(IDS, MASK)
    scores = torch.log_softmax(policy(input_ids=IDS).logits / 0.7, dim=-1)
    for row, column in MASK.nonzero().tolist():
        before = scores[row, column - 1]
        assert float(logprobs[row, column]) == pytest.approx(float(before[IDS[row, column]]), abs=1e-5)
        assert float(entropy[row, column]) == pytest.approx(float(-(before.exp() * before).sum()), abs=1e-4)
    assert not logprobs[~MASK].any()
    assert not entropy[~MASK].any()


def test_gradient_does_not_depend_on_the_chunk(tmp_path: Path) -> None:
    gradients = []
    for chunk in (2, 100):
        policy = load_policy(build_model_folder(tmp_path / "policy"))
        logprobs, entropy = TokenScorer(policy, 1.0, chunk)(IDS, MASK)
        assert not entropy.requires_grad
        (logprobs * torch.arange(12.0).view(2, 6)).sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_uniform_logits_have_the_entropy_of_the_vocabulary() -> None:
    _, entropy = token_logprobs(torch.randn(2, 6, 3), lambda h: h.new_zeros(h.shape[0], 50), IDS, MASK, 1.0, 4)
    torch.testing.assert_close(entropy[MASK], torch.full((5,), torch.tensor(50.0).log().item()))


def test_logits_exist_for_one_chunk_of_action_tokens_at_a_time() -> None:
    rows: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        return hidden @ torch.ones(3, 50)

    token_logprobs(torch.randn(2, 6, 3), head, IDS, MASK, 1.0, chunk_tokens=2)
    assert rows == [2, 2, 1]


def test_memory_kept_for_the_backward_pass_does_not_grow_with_tokens_times_vocabulary() -> None:
    def kept_bytes(tokens: int, vocabulary: int) -> int:
        hidden = torch.randn(1, tokens + 1, 8, requires_grad=True)
        weight = torch.randn(vocabulary, 8, requires_grad=True)
        mask = torch.ones(1, tokens + 1, dtype=torch.bool)
        mask[:, 0] = False
        kept = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ids = torch.randint(0, vocabulary, (1, tokens + 1))
            logprobs, _ = token_logprobs(hidden, lambda h: h @ weight.T, ids, mask, 1.0, chunk_tokens=16)
        logprobs.sum().backward()
        return sum(kept.values()) - weight.untyped_storage().nbytes() * (weight.data_ptr() in kept)

    small, large = kept_bytes(256, 100), kept_bytes(256, 5000)
    assert large <= small + 1024, f"{small} → {large} bytes"


def test_micro_batch_without_action_tokens_gives_a_zero_gradient(tmp_path: Path) -> None:
    policy = load_policy(build_model_folder(tmp_path / "policy"))
    logprobs, _ = TokenScorer(policy, 1.0, 8)(IDS, torch.zeros_like(MASK))
    logprobs.sum().backward()
    assert all(not p.grad.any() for p in policy.parameters() if p.grad is not None)
    assert policy.get_output_embeddings().weight.grad is not None


def test_softcapped_logits_are_scored_as_the_model_makes_them() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, final_logit_softcapping=0.1, initializer_range=0.5, **shape
    )
    policy = Gemma2ForCausalLM(config).eval()
    scorer = TokenScorer(policy, 1.0, 100)
    scorer.check()
    logprobs, _ = scorer(IDS, MASK)
    expected = torch.log_softmax(policy(input_ids=IDS).logits, -1)[0, 1, IDS[0, 2]]
    assert float(logprobs[0, 2]) == pytest.approx(float(expected), abs=1e-5)
