"""What a rollout needs from an inference engine: sessions that take tokens and give back sampled ones.

A session is one growing token sequence with its own randomness; between two turns the engine keeps what it has
computed for it. Ids go in, ids come out, each with its log-probability and the version of the weights that sampled it.
An engine never decodes, and never ends a turn by a token of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sao_core.trajectory import Sampling


class StopReason(StrEnum):
    """Why the sampling of a turn ended."""

    STOP_TOKEN = "stop_token"
    """The last token sampled is one of the stop ids."""
    MAX_NEW_TOKENS = "max_new_tokens"
    """As many tokens as were asked for."""
    CONTEXT_FULL = "context_full"
    """The session's sequence is as long as the engine holds."""
    DEADLINE = "deadline"
    """The time was over; what was sampled until then counts, and may be nothing."""


class EngineError(RuntimeError):
    """The engine cannot go on, e.g. because the weights give no finite probabilities."""


@dataclass(frozen=True)
class Sampled:
    """The tokens of one turn, n of them: ``token_ids`` int32, ``logprobs`` float32, ``versions`` int32, all (n,).

    ``logprobs`` are of the policy itself, log-softmax of logits ÷ temperature, under the weights of ``versions``,
    also where an evaluation drew greedily or from a truncated distribution.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    stop_reason: StopReason


class Session(Protocol):
    """One token sequence. Hold one per rollout and close it."""

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        ...

    async def extend_and_sample(
        self, new_ids: Sequence[int], stop_ids: Set[int], max_new_tokens: int, deadline: float | None = None
    ) -> Sampled:
        """Append ``new_ids``, then sample until a stop id, ``max_new_tokens``, the context or the deadline ends it.

        ``deadline`` is a time of :func:`time.monotonic`. Raises :class:`ValueError` if ``new_ids`` leave no room for
        a token, :class:`EngineError` if the engine broke.
        """
        ...

    def restart(self) -> None:
        """Forget the tokens, keep the randomness: the next extension starts a new sequence."""
        ...

    def close(self) -> None:
        """Give the slot back. Closing twice is harmless."""
        ...


class Engine(Protocol):
    """Runs sessions side by side. One event loop owns it; nothing here is safe to call from another thread."""

    @property
    def slots(self) -> int:
        """Sessions that may be open at once."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        ...

    def open(self, sampling: Sampling, seed: int) -> Session:
        """A new session; ``seed`` (64 bits) and the weights fix its tokens. Raises RuntimeError if all are taken."""
        ...

    async def run(self) -> None:
        """Advance all sessions until cancelled. A failure reaches every session that waits, and is raised here."""
        ...

    async def swap(self, folder: Path, version: int) -> None:
        """Load other weights between two tokens; sessions go on under them."""
        ...


@dataclass
class EngineStats:
    """What an engine has done, for throughput metrics."""

    steps: int = 0
    """Forward passes."""
    sampled_tokens: int = 0
    processed_tokens: int = 0
    """Tokens that went through the model: sampled ones, prompts, observations and recomputed ones."""
    swaps: int = 0
    swap_s: float = 0.0
    """Time that loading weights took from sampling."""


def session_seed(seed: int, request_number: int, attempt: int) -> int:
    """64 bits that depend on a run's seed, the request and the attempt only: not on slots, batches or timing."""
    digest = hashlib.sha256(f"{seed}\x1f{request_number}\x1f{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
