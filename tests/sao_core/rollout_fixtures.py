"""Small models, a scripted engine and scripted environments, for tests of the rollout rooms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from sao_core.environments.base import Environment, StepResult, Task
from sao_core.models.policy import save_policy
from sao_core.models.tiny import CHAT_TEMPLATE, PAD, ROLES, build_tokenizer
from sao_core.models.tiny import END as END_TEXT
from sao_core.protocols import RolloutRequest
from sao_core.rollout.engine import EngineStats, Sampled, StopReason
from sao_core.trajectory import Message, Purpose, Role, Sampling

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id

REWRITING_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Drops the thinking of every turn but the last, as reasoning models' templates do."""


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Ten letters and the special tokens: so few that a random policy ends its turns now and then."""
    specials = [PAD, END_TEXT, *(f"<|{role}|>" for role in ROLES)]
    words = {word: index for index, word in enumerate([*specials, *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_TEXT, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def small_model(seed: int = 0, *, moe: bool = True, vocabulary: int = len(TOKENIZER), spread: float = 0.3) -> Any:
    """A random causal LM with grouped-query attention; with the usual ``spread`` far from uniform."""
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": spread,
        "eos_token_id": None,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    if moe:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape) if moe else LlamaConfig(**shape)).eval()


def model_folder(folder: Path, seed: int = 0, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> Path:
    save_policy(small_model(seed), tokenizer, folder)
    return folder


@torch.no_grad()
def full_forward(model: Any, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probability of each token given those before it, without any cache: (T,) → (T,), 0 for the first."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature, dim=-1)
    chosen = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1)
    return np.concatenate([np.zeros(1, np.float32), chosen.numpy()])


def request(number: int = 0, attempt: int = 1, **changes: Any) -> RolloutRequest:
    fields: dict[str, Any] = {"run_id": "run", "number": number, "attempt": attempt, "purpose": Purpose.TRAIN}
    return RolloutRequest(**fields | {"prompt_key": f"task-{number}"} | changes)


class ScriptedEngine:
    """Says the given turns, ids as they are, with log-probabilities −0.5, −1.0, … and version 7."""

    def __init__(self, turns: Sequence[Sequence[int]], context: int = 512, slots: int = 1) -> None:
        self.turns, self.context, self.slots, self.version = list(turns), context, slots, 7
        self.stats = EngineStats()
        self.heard: list[list[int]] = []
        self.opened = self.closed = self.restarts = 0
        self.seeds: list[int] = []

    def open(self, sampling: Sampling, seed: int) -> ScriptedEngine:
        self.opened += 1
        self.seeds.append(seed)
        self.length = 0
        return self

    @property
    def room(self) -> int:
        return self.context - self.length

    async def extend_and_sample(
        self, new_ids: Sequence[int], stop_ids: Set[int], max_new_tokens: int, deadline: float | None = None
    ) -> Sampled:
        self.heard.append(list(new_ids))
        said = self.turns.pop(0)[:max_new_tokens]
        self.length += len(new_ids) + len(said)
        reason = StopReason.STOP_TOKEN if said and said[-1] in stop_ids else StopReason.MAX_NEW_TOKENS
        logprobs = -0.5 * np.arange(1, len(said) + 1, dtype=np.float32)
        return Sampled(np.array(said, np.int32), logprobs, np.full(len(said), 7, np.int32), reason)

    def restart(self) -> None:
        self.restarts += 1
        self.length = 0

    def close(self) -> None:
        self.closed += 1

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def swap(self, folder: Path, version: int) -> None:
        self.version = version


Answer = StepResult | Exception | Callable[[], Any]


class ScriptedEnvironment(Environment):
    """Answers each step with the next of ``results``: a result, an exception to raise, or a coroutine function."""

    version: ClassVar[str] = "3"
    reward_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def __init__(self, results: Sequence[Answer], opening: Any = (Message(Role.USER, "what is 1 plus 2"),)) -> None:
        self.results, self.opening = list(results), opening
        self.actions: list[str] = []
        self.closed = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return await self._give(self.opening)

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        return await self._give(self.results.pop(0))

    async def close(self) -> None:
        self.closed += 1

    async def _give(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer


def heard(text: str, reward: float = 0.0, **changes: Any) -> StepResult:
    """A step after which the conversation goes on."""
    return StepResult((Message(Role.TOOL, text),), reward, **changes)


def over(reward: float, parts: Mapping[str, float] | None = None) -> StepResult:
    """The step that ends the task."""
    return StepResult((), reward, terminated=True, info={"reward_parts": parts} if parts else {})


def said(text: str) -> list[int]:
    """Ids of a turn of the policy, with its end-of-turn token."""
    return [*TOKENIZER.encode(text, add_special_tokens=False), END]
