"""The soak's model: one narrow Qwen3-MoE layer with a context of 8192 tokens, as an ordinary Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from sao_core.models.tiny import build_tokenizer, tiny_config
from sao_core.quiet import quiet_libraries

CONTEXT = 8192


def build_soak_model(folder: Path, seed: int) -> None:
    """Write model, tokenizer and chat template to ``folder``."""
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = CONTEXT
    config = tiny_config(tokenizer)
    config.update(
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "max_position_embeddings": CONTEXT,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    quiet_libraries()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    build_soak_model(Path(sys.argv[1]), seed=0)
