"""A checkpoint from nothing: a Qwen3-MoE model of about 0.3 million parameters, with tokenizer and chat template.

Written as an ordinary Hugging Face folder and loaded like any other. It needs no network and no data: the
vocabulary is all bytes, and the words of the calculator environment as tokens of their own, so that its rollouts
are short while any text can still be encoded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from sao_core.quiet import quiet_libraries

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Every message is rendered by itself, so a longer conversation always extends a shorter one."""

_SAMPLE_TEXTS = (
    "solve 1 plus 2 minus 3 times 4",
    "compute 1",
    "find 1",
    "calc: 1",
    "answer: 1",
    "error: bad symbol",
    "error: bad order",
    "error: number missing",
    "error: bracket open",
    "error: too long",
    "error: write calc: or answer:",
    "You may use a calculator. To call it, write `calc: ` and an expression such as `7*3-4`. "
    "When you know the result, write `answer: ` and the number.",
)
INITIALIZER_RANGE = 0.1
"""Large, so that two narrow layers learn to copy within a few hundred steps; 0.02 takes several times as many."""
ROPE_THETA = 1000.0
"""Small, so that every rotary frequency tells positions apart within the few dozen tokens of a conversation."""

_PIECE = r"\d| ?[A-Za-z]+:? ?"
"""One digit, or a word with the spaces (and the colon) around it."""


def build_tiny(folder: Path | str, seed: int) -> None:
    """Write model, generation config, tokenizer and chat template to ``folder``; equal seeds give equal weights."""
    folder = Path(folder)
    tokenizer = build_tokenizer()
    config = tiny_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0
    )
    quiet_libraries()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeConfig:
    """The architecture: two layers, four experts of which two serve a token."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: bytes, the pieces of the sample texts, and one special token per role and for end and padding."""
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = [piece for text in _SAMPLE_TEXTS for piece, _ in splitter.pre_tokenize_str(text)]
    words = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces])
    vocabulary = {piece: index for index, piece in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
