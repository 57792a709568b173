"""The engine protocol over any Transformers causal LM with full attention, in one process.

    sessions ──extend──▶ rows that wait ──plan──▶ one packed forward ──draw──▶ one token per row ──▶ sessions
                              ▲                                                      │
                              └──────────────── rows that have not stopped ──────────┘

Every step is one forward pass over whatever is new in any slot: one token of a row that decodes, all tokens of one
that just got a prompt or an observation, and after a swap that recomputes, a row's whole sequence. Nothing waits for
the slowest row, and there is one transfer from the device a step.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sao_core.config import ConfigError, TrainConfig
from sao_core.models.experts import use_cpu_experts
from sao_core.models.policy import load_policy, load_tokenizer, load_weights
from sao_core.rollout.engine import EngineError, EngineStats, Sampled, StopReason
from sao_core.rollout.renderer import Renderer
from sao_core.rollout.sampling import draw, policy_logprobs, truncate, uniforms
from sao_core.rollout.slot_attention import ATTENTION_NAME, SlotCache, StepPlan, plan_step
from sao_core.trajectory import Sampling

STEP_TOKENS = 4096
"""Prompt, observation and recomputed tokens in one step, padding included; what is left waits for the next."""
MASK_ELEMENTS = 2**25
"""Size of the attention mask of those rows; very long sequences then go through in several steps."""


class TransformersEngine:
    """Continuous slots over one model.

    ``model`` is a causal LM on its device, from now on the engine's own. ``context`` is the longest sequence and the
    size of a slot's cache. ``on_swap`` says what happens to running sequences when weights change: `recompute` runs
    each through the new weights before it goes on (one that waits for its environment: when it comes back), `keep`
    leaves the old keys and values where they are.
    Raises :class:`ConfigError` if the model's attention is not the standard one.
    """

    def __init__(
        self,
        model: Any,
        version: int,
        *,
        slots: int,
        context: int,
        on_swap: Literal["recompute", "keep"] = "recompute",
        step_tokens: int = STEP_TOKENS,
        mask_elements: int = MASK_ELEMENTS,
    ) -> None:
        self._model = model.eval()
        self._version, self._slots, self._context, self._on_swap = version, slots, context, on_swap
        self._step_tokens, self._mask_elements = step_tokens, mask_elements
        self._stats = EngineStats()
        self._like = next(model.parameters()).detach()
        self._cache = SlotCache(slots, context)
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._free = list(range(slots))
        self._waiting: dict[int, asyncio.Future[Sampled]] = {}
        self._wake = asyncio.Event()
        self._tokens = np.zeros((slots, context), np.int64)
        self._logprobs = np.zeros((slots, context), np.float32)
        self._versions = np.zeros((slots, context), np.int32)
        self._length = np.zeros(slots, np.int64)
        self._cached = np.zeros(slots, np.int64)
        self._turn_start = np.zeros(slots, np.int64)
        self._turn_limit = np.zeros(slots, np.int64)
        self._waiting_since = np.zeros(slots, np.int64)
        self._active = np.zeros(slots, np.bool_)
        self._deadline = np.full(slots, np.inf)
        self._stop_ids = np.full((slots, 1), -1, np.int64)
        self._seed = np.zeros(slots, np.uint64)
        self._drawn = np.zeros(slots, np.uint64)
        self._temperature = np.ones(slots)
        self._top_p = np.ones(slots)
        self._top_k = np.zeros(slots)
        self._greedy = np.zeros(slots)
        if self._like.device.type == "cpu":
            use_cpu_experts(model)
        self._take_over_attention()

    @property
    def slots(self) -> int:
        """Sessions that may be open at once."""
        return self._slots

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self._stats

    def open(self, sampling: Sampling, seed: int) -> SlotSession:
        """A session in the lowest free slot; raises RuntimeError if there is none."""
        if not self._free:
            raise RuntimeError(f"all {self._slots} slots are taken")
        slot = heappop(self._free)
        self._length[slot] = self._cached[slot] = self._drawn[slot] = 0
        self._seed[slot] = seed
        self._temperature[slot], self._greedy[slot] = sampling.temperature, sampling.greedy
        self._top_p[slot], self._top_k[slot] = sampling.top_p, sampling.top_k
        return SlotSession(self, slot)

    async def run(self) -> None:
        """Advance all sessions until cancelled, one step at a time; other coroutines run between two steps."""
        try:
            while True:
                if not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
                self.step()
                await asyncio.sleep(0)
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(EngineError(f"the engine stopped: {error}"))
            self._waiting.clear()
            raise

    async def swap(self, folder: Path, version: int) -> None:
        """Load the weights of ``folder`` now, between two tokens; from the next token on they sample."""
        started = time.perf_counter()
        load_weights(self._model, folder)
        self._version = version
        if self._on_swap == "recompute":
            self._cached[:] = 0
        self._stats.swaps += 1
        self._stats.swap_s += time.perf_counter() - started

    @torch.inference_mode()
    def step(self) -> None:
        """Process what is new in the active rows and draw one token for each that is then complete."""
        active = np.flatnonzero(self._active)
        new = self._length[active] - self._cached[active]
        decoding = active[new == 1]
        extended, taken = self._choose_extended(active[new > 1])
        finished = np.flatnonzero(self._cached[extended] + taken == self._length[extended])
        plan = plan_step(self._tokens, self._cached, decoding, extended, taken, finished, self._like)
        rows = np.concatenate([decoding, extended[finished]])
        logits = self._forward(plan)
        self._cached[decoding] += 1
        self._cached[extended] += taken
        self._stats.steps += 1
        self._stats.processed_tokens += int(plan.input_ids.shape[1])
        if len(rows):
            ids, logprobs = self._draw(logits, rows)
            self._accept(rows, ids, logprobs)

    def _choose_extended(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and how many of their new tokens to process now, the longest waiting first, under the step's budget."""
        rows = rows[np.argsort(self._waiting_since[rows], kind="stable")]
        new = self._length[rows] - self._cached[rows]
        for count in range(len(rows), 1, -1):
            longest = int(self._length[rows[:count]].max())
            padded = count * int(new[:count].max())
            if padded <= self._step_tokens and padded * longest <= self._mask_elements:
                return rows[:count], new[:count]
        alone = max(1, min(self._step_tokens, self._mask_elements // self._context))
        return rows[:1], np.minimum(new[:1], alone)

    def _forward(self, plan: StepPlan) -> Tensor:
        """Logits (n, V) of the plan's sampling positions."""
        self._cache.begin_step(plan.slots, plan.position_ids[0])
        output = self._model(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            use_cache=True,
            logits_to_keep=plan.sampling,
            plan=plan,
            **{self._cache_argument: self._cache},
        )
        logits: Tensor = output.logits[0]
        return logits

    def _draw(self, logits: Tensor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One token per row and its log-probability, in one transfer each way."""
        greedy, top_p, top_k = self._greedy[rows], self._top_p[rows], self._top_k[rows]
        host = np.stack([self._temperature[rows], uniforms(self._seed[rows], self._drawn[rows]), greedy, top_p, top_k])
        settings = torch.from_numpy(host).to(logits.device, non_blocking=True)
        logprobs = policy_logprobs(logits, settings[0].float())
        allowed = logprobs
        if (top_p < 1).any() or top_k.any():
            allowed = truncate(logprobs, settings[3], settings[4])
        ids = draw(allowed, settings[1])
        if greedy.any():
            ids = torch.where(settings[2] > 0, logprobs.argmax(dim=-1), ids)
        ids = ids.clamp_(max=logprobs.shape[1] - 1)
        chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
        drawn = torch.stack([ids.double(), chosen.double()]).cpu().numpy()
        return drawn[0].astype(np.int64), drawn[1].astype(np.float32)

    def _accept(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Append the drawn tokens and end the turns that stop with them."""
        if not np.isfinite(logprobs).all():
            raise EngineError(f"policy version {self._version} gives no finite log-probabilities: broken weights")
        at = self._length[rows]
        self._tokens[rows, at] = ids
        self._logprobs[rows, at] = logprobs
        self._versions[rows, at] = self._version
        self._length[rows] += 1
        self._drawn[rows] += np.uint64(1)
        self._stats.sampled_tokens += len(rows)
        stopped = (self._stop_ids[rows] == ids[:, None]).any(axis=1)
        spent = at + 1 >= self._turn_limit[rows]
        late = self._deadline[rows] < time.monotonic()
        for index in np.flatnonzero(stopped | spent | late):
            slot = int(rows[index])
            if stopped[index]:
                reason = StopReason.STOP_TOKEN
            elif spent[index]:
                full = self._length[slot] == self._context
                reason = StopReason.CONTEXT_FULL if full else StopReason.MAX_NEW_TOKENS
            else:
                reason = StopReason.DEADLINE
            self._end_turn(slot, reason)

    def _end_turn(self, slot: int, reason: StopReason) -> None:
        self._active[slot] = False
        future = self._waiting.pop(slot)
        if not future.done():
            turn = slice(int(self._turn_start[slot]), int(self._length[slot]))
            token_ids = self._tokens[slot, turn].astype(np.int32)
            future.set_result(
                Sampled(token_ids, self._logprobs[slot, turn].copy(), self._versions[slot, turn].copy(), reason)
            )

    def _start_turn(
        self, slot: int, new_ids: Sequence[int], stop_ids: Set[int], max_new_tokens: int, deadline: float | None
    ) -> asyncio.Future[Sampled]:
        start = int(self._length[slot])
        end = start + len(new_ids)
        if end == 0 or max_new_tokens < 1:
            raise ValueError(f"a turn needs a context and room for a token: got {end} and {max_new_tokens} tokens")
        if end >= self._context:
            raise ValueError(f"{len(new_ids)} tokens leave no room: {self._context - start} of {self._context} free")
        if len(stop_ids) > self._stop_ids.shape[1]:
            wider = np.full((self._slots, len(stop_ids)), -1, np.int64)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._tokens[slot, start:end] = new_ids
        self._length[slot] = self._turn_start[slot] = end
        self._turn_limit[slot] = min(end + max_new_tokens, self._context)
        self._deadline[slot] = np.inf if deadline is None else deadline
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = sorted(stop_ids)
        self._waiting_since[slot] = self._stats.steps
        self._active[slot] = True
        self._waiting[slot] = asyncio.get_running_loop().create_future()
        self._wake.set()
        return self._waiting[slot]

    def _release(self, slot: int) -> None:
        self._active[slot] = False
        self._waiting.pop(slot, None)

    def _take_over_attention(self) -> None:
        """Switch the model to slot attention; raises :class:`ConfigError` if it then computes anything else."""
        name = type(self._model).__name__
        try:
            gap = self._probe()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{name} does not run with keys and values in slots: {error}") from error
        if not gap <= (1e-3 if self._like.dtype == torch.float32 else 0.1):
            raise ConfigError(
                f"{name} is no plain full-attention model: with cached keys and values its log-probabilities differ by "
                f"{gap:.3g} on average"
            )

    @torch.inference_mode()
    def _probe(self) -> float:
        """Mean gap of log-probabilities between a forward as the model came and one with slots (5 tokens, then 3)."""
        count = min(8, self._context)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        ids = torch.arange(1, count + 1, device=self._like.device).remainder_(vocabulary)
        expected = torch.log_softmax(self._model(input_ids=ids[None], use_cache=False).logits[0].float(), dim=-1)
        self._model.set_attn_implementation(ATTENTION_NAME)
        if self._model.config._attn_implementation != ATTENTION_NAME:
            raise ConfigError(f"{type(self._model).__name__} has attention that cannot be replaced; take another model")
        slot = np.array([self._slots - 1])
        none, self._tokens[slot, :count] = slot[:0], ids.cpu().numpy()
        rows = []
        for stop in range(min(5, count), count + 1):
            new = stop - self._cached[slot]
            decoding, extended = (slot, none) if new[0] == 1 else (none, slot)
            taken, finished = new[: len(extended)], np.arange(len(extended))
            plan = plan_step(self._tokens, self._cached, decoding, extended, taken, finished, self._like)
            rows.append(torch.log_softmax(self._forward(plan)[0].float(), dim=-1))
            self._cached[slot] = stop
        self._cached[slot] = 0
        return float((torch.stack(rows) - expected[min(5, count) - 1 :]).abs().mean())


@dataclass
class SlotSession:
    """A session of :class:`TransformersEngine`: one slot until it is closed."""

    _engine: TransformersEngine
    _slot: int
    _closed: bool = False

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._engine._context - int(self._engine._length[self._slot])

    async def extend_and_sample(
        self, new_ids: Sequence[int], stop_ids: Set[int], max_new_tokens: int, deadline: float | None = None
    ) -> Sampled:
        """See :class:`sao_core.rollout.engine.Session`."""
        if self._closed:
            raise RuntimeError("the session is closed")
        future = self._engine._start_turn(self._slot, new_ids, stop_ids, max_new_tokens, deadline)
        try:
            return await future
        except asyncio.CancelledError:
            self._engine._release(self._slot)
            raise

    def restart(self) -> None:
        """Forget the tokens: the next extension starts a new sequence in the same slot."""
        self._engine._length[self._slot] = self._engine._cached[self._slot] = 0

    def close(self) -> None:
        """Give the slot back."""
        if not self._closed:
            self._closed = True
            self._engine._release(self._slot)
            heappush(self._engine._free, self._slot)


def start_transformers_engine(config: TrainConfig, folder: Path, version: int) -> tuple[TransformersEngine, Renderer]:
    """The engine that ``config.rollout`` describes over the policy in ``folder``, and the renderer of its tokenizer.

    Raises :class:`ConfigError` if the folder is no causal LM with full attention, or its tokenizer has no template.
    """
    settings = config.rollout
    engine = TransformersEngine(
        load_policy(folder, config.model.dtype, settings.device),
        version,
        slots=settings.slots,
        context=settings.max_context_tokens,
        on_swap=settings.on_swap,
    )
    return engine, Renderer(load_tokenizer(folder))
