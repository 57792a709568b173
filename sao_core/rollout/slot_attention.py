"""One forward pass over rows of different lengths: a packed batch, a cache with a slot per row, and its attention.

All new tokens of a step (one for each row that decodes, several for rows that just got a prompt or an observation)
form a single sequence of N tokens, so the model's linear layers and experts run once. Keys and values go to
preallocated slots; attention treats decoding rows and extended rows as two padded groups.
Works with any Transformers causal LM whose attention is the standard one behind its attention interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from sao_core.config import ConfigError

ATTENTION_NAME = "sao_slots"

Ints = npt.NDArray[np.int64]


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of ``slots`` rows of at most ``context`` tokens, allocated at the first forward."""

    def __init__(self, slots: int, context: int) -> None:
        super().__init__(layers=[])
        self.slots, self.context = slots, context
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}
        self._slot = self._position = torch.empty(0, dtype=torch.int64)

    def begin_step(self, slot: Tensor, position: Tensor) -> None:
        """Say where the tokens of the next forward go, both (N,)."""
        self._slot, self._position = slot, position
        self._rows.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (1, heads, N, D) of this step's tokens; returns all slots as (slots, heads, context, D)."""
        stored = []
        for tensors, states in ((self._keys, key_states), (self._values, value_states)):
            heads, _, size = states[0].shape
            if layer_idx not in tensors:
                tensors[layer_idx] = states.new_zeros(self.slots, heads, self.context, size)
            stored.append(tensors[layer_idx])
            stored[-1].view(-1, size).index_copy_(0, self._rows_of(heads), states[0].reshape(-1, size))
        return stored[0], stored[1]

    def _rows_of(self, heads: int) -> Tensor:
        """Index of each (head, token) among all (slot, head, position); layers of one step share it."""
        if heads not in self._rows:
            head = torch.arange(heads, device=self._slot.device).unsqueeze(1)
            self._rows[heads] = ((self._slot * heads + head) * self.context + self._position).view(-1)
        return self._rows[heads]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows have lengths of their own; positions are always given."""
        return 0


@dataclass(frozen=True)
class Decoding:
    """Rows with one new token each: the first ``count`` tokens of the packed batch."""

    count: int
    slots: Tensor
    """(count,) slot of each row."""
    in_place: int
    """> 0: attend over this many first slots without copying them; 0: copy the rows' slots together."""
    row_of_slot: Tensor
    """(in_place,) row of each of those slots; of one that does not decode, any."""
    mask: Tensor
    """(in_place or count, 1, 1, longest) 0 or −inf."""


@dataclass(frozen=True)
class Extension:
    """Rows with several new tokens: the rest of the packed batch, padded to the longest for attention."""

    slots: Tensor
    """(R,) slot of each row."""
    queries: Tensor
    """(R, Q) index into the packed batch; padding repeats the row's last token."""
    outputs: Tensor
    """(tokens of these rows,) where each token of the packed batch stands in the padded (R · Q)."""
    mask: Tensor
    """(R, 1, Q, longest) 0 or −inf."""


@dataclass(frozen=True)
class StepPlan:
    """One packed forward: N tokens, of which the ``sampling`` ones (n,) get their next token drawn."""

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    """(N,) slot of each token."""
    sampling: Tensor
    decoding: Decoding | None
    extension: Extension | None


def plan_step(
    tokens: Ints,
    cached: Ints,
    decoding: Ints,
    extended: Ints,
    taken: Ints,
    finished: Ints,
    like: Tensor,
) -> StepPlan:
    """Lay out one step on the host and send it to the device in one copy.

    ``tokens`` (slots, context) holds every row's ids, ``cached`` (slots,) how many of them have been through the
    model. ``decoding`` are the slots with one new token, ``extended`` those with ``taken`` new ones to process now;
    ``finished`` indexes the extended rows that are then complete. ``like`` has the model's dtype and device.
    """
    start, total = cached[extended], int(taken.sum())
    first = np.cumsum(taken) - taken
    row = np.repeat(np.arange(len(extended)), taken)
    offset = np.arange(total) - first[row]
    slot = np.concatenate([decoding, extended[row]])
    position = np.concatenate([cached[decoding], start[row] + offset])
    width = int(taken.max(initial=0))
    queries = len(decoding) + first[:, None] + np.minimum(np.arange(width), taken[:, None] - 1)
    sampling = np.concatenate([np.arange(len(decoding)), (len(decoding) + first + taken - 1)[finished]])
    in_place = _slots_in_place(decoding)
    row_of_slot = np.zeros(in_place, np.int64)
    if in_place:
        row_of_slot[decoding] = np.arange(len(decoding))
        last_key = np.zeros(in_place, np.int64)
        last_key[decoding] = cached[decoding]
    else:
        last_key = cached[decoding]
    parts = [
        tokens[slot, position],
        position,
        slot,
        sampling,
        decoding,
        row_of_slot,
        last_key,
    ]
    parts += [extended, queries.ravel(), row * width + offset]
    sizes = [len(part) for part in parts]
    ids, positions, token_slots, sampled, dec_slots, dec_rows, last, ext_slots, query, output = torch.split(
        torch.from_numpy(np.concatenate(parts)).to(like.device, non_blocking=True), sizes
    )
    decode = extension = None
    if len(decoding):
        longest = int(cached[decoding].max()) + 1
        decode = Decoding(len(decoding), dec_slots, in_place, dec_rows, _causal_mask(last[:, None], longest, like))
    if len(extended):
        longest = int((start + taken).max())
        query = query.view(len(extended), width)
        extension = Extension(ext_slots, query, output, _causal_mask(positions[query], longest, like))
    return StepPlan(ids[None], positions[None], token_slots, sampled, decode, extension)


def _slots_in_place(decoding: Ints) -> int:
    """Attending over unused slots costs less than copying used ones together, until two thirds are unused."""
    span = int(decoding[-1]) + 1 if len(decoding) else 0
    return span if 3 * len(decoding) >= span else 0


def _causal_mask(last_key: Tensor, longest: int, like: Tensor) -> Tensor:
    """(R, Q) position of each query → (R, 1, Q, longest): 0 up to that position, −inf beyond."""
    beyond = torch.arange(longest, device=like.device) > last_key.unsqueeze(-1)
    return torch.zeros(beyond.shape, dtype=like.dtype, device=like.device).masked_fill_(beyond, -torch.inf).unsqueeze(1)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: StepPlan | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed step: query (1, H, N, D), key and value as :meth:`SlotCache.update` returns them.

    Returns (1, N, H, D of the values). Raises :class:`ConfigError` for attention that is not plain and full.
    """
    if plan is None:
        raise RuntimeError(f"attention `{ATTENTION_NAME}` needs the plan of a step; use the engine's own forward")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"the rollout engine supports plain full attention only: this model uses `{name}`")
    if sliding_window is not None and sliding_window < key.shape[2]:
        raise ConfigError(
            f"the rollout engine supports full attention only: this model's sliding window is {sliding_window}; "
            f"set rollout.max_context_tokens to at most that"
        )
    packed = query[0].transpose(0, 1)
    outputs = []
    if plan.decoding is not None:
        outputs.append(_decode(packed[: plan.decoding.count], key, value, plan.decoding, scaling))
    if plan.extension is not None:
        outputs.append(_extend(packed, key, value, plan.extension, scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def _decode(query: Tensor, key: Tensor, value: Tensor, rows: Decoding, scaling: float | None) -> Tensor:
    longest, heads = rows.mask.shape[-1], key.shape[1]
    grouped = query.reshape(rows.count, heads, -1, query.shape[-1])
    if rows.in_place:
        key, value = key[: rows.in_place, :, :longest], value[: rows.in_place, :, :longest]
    else:
        key, value = key[:, :, :longest].index_select(0, rows.slots), value[:, :, :longest].index_select(0, rows.slots)
    scattered = rows.in_place > rows.count
    if scattered:
        grouped = grouped.index_select(0, rows.row_of_slot)
    attended = scaled_dot_product_attention(grouped, key, value, rows.mask, scale=scaling)
    if scattered:
        attended = attended.index_select(0, rows.slots)
    return attended.reshape(rows.count, query.shape[1], -1)


def _extend(packed: Tensor, key: Tensor, value: Tensor, rows: Extension, scaling: float | None) -> Tensor:
    count, width = rows.queries.shape
    longest, heads, size = rows.mask.shape[-1], key.shape[1], packed.shape[-1]
    padded = packed.index_select(0, rows.queries.view(-1)).view(count, width, heads, -1, size)
    per_key_head = padded.shape[3]
    grouped = padded.permute(0, 2, 3, 1, 4).reshape(count, heads, per_key_head * width, size)
    mask = rows.mask.repeat(1, 1, per_key_head, 1) if per_key_head > 1 else rows.mask
    key, value = key[:, :, :longest].index_select(0, rows.slots), value[:, :, :longest].index_select(0, rows.slots)
    attended = scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    attended = attended.view(count, heads, per_key_head, width, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(count * width, heads * per_key_head, -1).index_select(0, rows.outputs)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
