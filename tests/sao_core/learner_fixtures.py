"""A small Qwen3-MoE policy with a tokenizer, and rollouts made by hand, for tests of the learner's rooms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from sao_core.config import TrainConfig, parse_config
from sao_core.models.policy import save_policy
from sao_core.protocols import Batch, Rollout
from sao_core.trajectory import Outcome, Purpose, Sampling, Trajectory

VOCABULARY = 64
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def build_model_folder(
    folder: Path, *, seed: int = 0, moe: bool = True, hidden: int = 32, vocabulary: int = VOCABULARY
) -> Path:
    """Save a random causal LM of a few layers with a tokenizer and a chat template."""
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    if moe:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "norm_topk_prob": True}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape) if moe else Qwen3Config(**shape))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0")
    tokenizer.chat_template = TEMPLATE
    save_policy(model, tokenizer, folder)
    return folder


def make_config(**sections: Mapping[str, Any]) -> TrainConfig:
    """The defaults with learning rates for small models; each section is merged over them."""
    base: dict[str, dict[str, Any]] = {
        "policy": {"lr": 1e-3, "first_update_step": 1},
        "critic": {"lr": 1e-3, "lr_warmup_steps": 0},
        "learner": {"batch_size": 8, "micro_batch_tokens": 256, "device": "cpu"},
    }
    return parse_config({key: {**base.get(key, {}), **sections.get(key, {})} for key in {*base, *sections}})


def make_trajectory(number: int, ids: Sequence[int], mask: Sequence[bool], score: float, **changes: Any) -> Trajectory:
    """A trajectory whose reward sits on its last action token; behavior log-probabilities are −1 unless given."""
    action = np.array(mask, np.bool_)
    rewards = np.zeros(len(ids), np.float32)
    rewards[np.flatnonzero(action)[-1]] = score
    fields: dict[str, Any] = {
        "trajectory_id": f"t{number}",
        "run_id": "run",
        "request_number": number,
        "attempt": 1,
        "purpose": Purpose.TRAIN,
        "prompt_key": f"p{number}",
        "token_ids": np.array(ids, np.int32),
        "action_mask": action,
        "behavior_logprobs": np.where(action, np.float32(-1), np.float32(0)),
        "policy_versions": np.where(action, np.int32(1), np.int32(-1)),
        "rewards": rewards,
        "score": score,
        "outcome": Outcome.COMPLETED,
        "stop_reason": "done",
        "sampling": Sampling(),
    }
    return Trajectory(**{**fields, **changes})


def random_rollouts(count: int, *, seed: int = 0, vocabulary: int = VOCABULARY, longest: int = 40) -> list[Rollout]:
    """Two-turn rollouts of random tokens and lengths: prompt, action, observation, action."""
    random = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for number in range(count):
        spans = random.integers(1, longest // 4, size=4)
        mask = np.repeat([False, True, False, True], spans)
        ids = random.integers(2, vocabulary, size=len(mask))
        behavior = np.where(mask, -random.gamma(2.0, 1.0, size=len(mask)), 0.0).astype(np.float32)
        rollouts.append((make_trajectory(number, ids, mask, float(number % 2), behavior_logprobs=behavior),))
    return rollouts


def make_batch(rollouts: Sequence[Rollout], step: int = 1, **changes: Any) -> Batch:
    """A batch of one step."""
    return Batch(step=step, rollouts=tuple(rollouts), **changes)
