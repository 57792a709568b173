"""A sequence classifier whose logits are known: made of weights that count a share of tokens."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

WIDTH = 8
SLOPE, OFFSET = 6.0, 1.0


def share_classifier(
    folder: Path, tokenizer: PreTrainedTokenizerFast, liked: set[int], labels: int = 1, pad: bool = True
) -> Path:
    """Write a one-layer Llama that scores the share of ``liked`` token ids among all that it reads.

    Attention is uniform, so its last token sees the mean; see :func:`expected_logit`. With two labels, label 1 is the
    score and label 0 its negative, at half the size.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
        rms_norm_eps=0.0,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id if pad else None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForSequenceClassification(config)
    layer = model.model.layers[0]
    score = torch.zeros(WIDTH)
    score[:3] = torch.tensor([-OFFSET, -OFFSET, SLOPE])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, 1] = 1.0
        for token in liked:
            model.model.embed_tokens.weight[token] = torch.eye(WIDTH)[0]
        layer.self_attn.v_proj.weight[2, 0] = 1 / math.sqrt(WIDTH)
        layer.self_attn.o_proj.weight.copy_(torch.eye(WIDTH))
        model.score.weight.copy_(score[None] if labels == 1 else torch.stack([-score / 2, score / 2]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def expected_logit(share: float) -> float:
    """Where so large a share of the tokens is liked, by hand: x = e + share·e₂, normalised, then scored."""
    return math.sqrt(WIDTH / (1 + share * share)) * (SLOPE * share - OFFSET)
