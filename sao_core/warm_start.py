"""Supervised start of a policy: next-token training on the turns of the assistant in given conversations.

The paper starts from such a model. Conversations come from an environment's demonstrator or from a user's JSONL of
``messages``. Knows nothing of rewards and writes no files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from sao_core.config import ConfigError, WarmStartConfig
from sao_core.jsonl_rows import messages_of, read_rows
from sao_core.models.logprobs import TokenScorer
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Role

LR_WARMUP_FRACTION = 0.05
GRAD_CLIP = 1.0
ADAM_BETAS = (0.9, 0.95)
LOGPROB_CHUNK_TOKENS = 4096

Row = tuple[Tensor, Tensor]
"""Token ids (T,) int64 and action mask (T,) bool of one conversation."""


def warm_start(
    model: PreTrainedModel,
    renderer: Renderer,
    conversations: Sequence[Sequence[Message]],
    config: WarmStartConfig,
    seed: int,
    on_step: Callable[[int, int, float], None] | None = None,
    micro_batch_tokens: int = 8192,
) -> dict[str, float]:
    """Train ``model`` in place on the action tokens of ``conversations``; it is in evaluation mode afterwards.

    AdamW with linear warm-up and cosine decay to 0; the loss of a step is the mean over its action tokens (nats),
    however ``micro_batch_tokens`` (padded tokens that are in memory at once) cuts it. A step's conversations are drawn
    at random, never by length: where length goes with difficulty, that would make every step one-sided.
    ``on_step`` is told (steps done, steps in all, loss). Returns ``warm_start/loss`` (mean of the last tenth of the
    steps), ``warm_start/steps``, ``warm_start/action_tokens`` (per epoch) and ``warm_start/seconds``. The same seed and
    number of threads give the same weights. Raises ConfigError if a conversation has no turn to learn from.
    """
    started = time.monotonic()
    rows = [_row(renderer, messages, number) for number, messages in enumerate(conversations, start=1)]
    if not rows:
        raise ConfigError("warm start needs at least one conversation: got none")
    rng = np.random.default_rng(seed)
    total = config.epochs * math.ceil(len(rows) / config.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=ADAM_BETAS, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, total))
    scorer = TokenScorer(model, temperature=1.0, chunk_tokens=LOGPROB_CHUNK_TOKENS)
    losses: list[float] = []
    model.train()
    for _ in range(config.epochs):
        order = rng.permutation(len(rows))
        for start in range(0, len(rows), config.batch_size):
            batch = [rows[index] for index in order[start : start + config.batch_size]]
            optimizer.zero_grad()
            losses.append(_backward(scorer, batch, micro_batch_tokens, model.device))
            clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            schedule.step()
            if on_step is not None:
                on_step(len(losses), total, losses[-1])
    model.eval()
    return {
        "warm_start/loss": float(np.mean(losses[-max(1, total // 10) :])),
        "warm_start/steps": float(total),
        "warm_start/action_tokens": float(sum(int(mask.sum()) for _, mask in rows)),
        "warm_start/seconds": time.monotonic() - started,
    }


def _row(renderer: Renderer, messages: Sequence[Message], number: int) -> Row:
    try:
        ids, mask = renderer.conversation(messages)
    except ValueError as error:
        raise ConfigError(f"conversation {number}: {error}") from None
    return torch.tensor(ids), torch.tensor(mask)


def _lr_factor(step: int, total: int) -> float:
    """Share of the peak learning rate at ``step`` (from 0): linear up, then half a cosine down."""
    rising = max(1, round(LR_WARMUP_FRACTION * total))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _backward(scorer: TokenScorer, batch: Sequence[Row], micro_batch_tokens: int, device: torch.device) -> float:
    """Add the gradient of the mean loss over the batch's action tokens; returns that loss."""
    count = sum(int(mask.sum()) for _, mask in batch)
    total = 0.0
    for part in _parts(batch, micro_batch_tokens):
        ids, mask = _pad(part, device)
        logprobs, _ = scorer(ids, mask)
        loss = -logprobs.sum() / count
        loss.backward()
        total += float(loss.detach())
    return total


def _parts(batch: Sequence[Row], micro_batch_tokens: int) -> Iterator[list[Row]]:
    """Rows by ascending length, as many at a time as fit the budget with their padding; at least one."""
    part: list[Row] = []
    for row in sorted(batch, key=lambda row: row[0].shape[0]):
        if part and (len(part) + 1) * row[0].shape[0] > micro_batch_tokens:
            yield part
            part = []
        part.append(row)
    yield part


def _pad(rows: Sequence[Row], device: torch.device) -> Row:
    """Right-padded (B, T) ids and masks; padding is no action, and causal attention keeps it out of the rest."""
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([mask for _, mask in rows], batch_first=True)
    return ids.to(device), mask.to(device)


def read_conversations(path: Path, limit: int | None = None) -> list[tuple[Message, ...]]:
    """Read a JSONL file with one object per line whose ``messages`` is a list of ``role`` and ``content``.

    Takes at most ``limit`` of them, from the top. Raises ConfigError with file and line.
    """
    conversations: list[tuple[Message, ...]] = []
    for where, row in islice(read_rows(path, "warm_start.path"), limit):
        messages = messages_of(row, where)
        if not any(message.role is Role.ASSISTANT for message in messages):
            raise ConfigError(f"{where}: `messages` needs an assistant turn to learn from")
        conversations.append(messages)
    if not conversations:
        raise ConfigError(f"warm_start.path holds no conversation: {path}")
    return conversations
