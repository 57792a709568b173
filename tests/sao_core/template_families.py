"""Small tokenizers with the special tokens and the chat templates (tests/data/templates) of model families."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
MISTRAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[ARGS]",
)
PHI = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>", "<|tool_call|>")

SPECIAL_TOKENS: dict[str, tuple[str, ...]] = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_coder": CHATML,
    "llama3_2": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    "mistral_v0_3": MISTRAL,
    "mistral_small_3": MISTRAL,
    "deepseek_v3_1": DEEPSEEK,
    "deepseek_r1": DEEPSEEK,
    "gemma2": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "smollm2": CHATML,
    "phi4_mini": PHI,
    "zephyr": ("<s>", "</s>"),
}
EOS = {"gemma2": "<eos>", "phi4_mini": "<|endoftext|>", "smollm2": "<|im_end|>"}
"""Where it is not the second special token."""
SENTENCEPIECE = ("mistral_v0_3", "gemma2", "zephyr")
"""Families whose vocabulary writes spaces as ▁ and unknown characters as bytes."""

FAMILIES = tuple(SPECIAL_TOKENS)

_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen cut text before they look for pieces, but for English contractions."""

_SENTENCES = (
    "what is 1 plus 2? The answer is 3.\n\n",
    "You may call one or more functions to assist with the user query.\n",
    '{"name": "python", "arguments": {"code": "print(1 + 2)"}}\n</tool_call>\n',
    "<think>\nLet me see: 12 + 30 = 42.\n</think>\n\nThe answer is \\boxed{42}.",
)


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose pieces and special tokens are made as the family's are."""
    special = SPECIAL_TOKENS[family]
    tokenizer = _sentencepiece() if family in SENTENCEPIECE else _byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if family.startswith("qwen"):
        tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>", "<think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=EOS.get(family, special[1]),
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _train(tokenizer, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def _sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_as_tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(tokenizer, trainers.BpeTrainer(vocab_size=420, special_tokens=bytes_as_tokens, show_progress=False))
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> None:
    tokenizer.train_from_iterator(_SENTENCES, trainer)
