"""Trajectories → micro-batches under a token budget, and back to one row per rollout.

A *row* is a rollout: its segments one after the other, padded on the right. A *micro-batch* is what one forward pass
reads: segments of similar length. Both directions are index copies; nothing here loops over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sao_core.protocols import Rollout
from sao_core.trajectory import Outcome, Trajectory


@dataclass(frozen=True)
class Rows:
    """The tokens of B rollouts, padded to T.

    ``token_ids``, ``policy_versions`` (−1 off the mask) int64, ``behavior_logprobs``, ``rewards`` float32,
    ``action_mask`` bool, all (B, T); ``lengths`` (B,) int64.
    """

    token_ids: Tensor
    action_mask: Tensor
    behavior_logprobs: Tensor
    rewards: Tensor
    policy_versions: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Token ids (b, t) of one forward pass, right-padded, and where each real token belongs in the rows.

    ``inside`` indexes the flattened micro-batch, ``outside`` the flattened rows. An ``idle`` one has nothing to train
    on and only keeps this rank in step with the others.
    """

    token_ids: Tensor
    inside: Tensor
    outside: Tensor
    idle: bool = False

    def gather(self, rows: Tensor) -> Tensor:
        """(B, T) rows → (b, t), 0 on padding; all 0 (no token is an action) if ``idle``."""
        part = torch.zeros(self.token_ids.shape, dtype=rows.dtype, device=rows.device)
        if not self.idle:
            part.view(-1)[self.inside] = rows.reshape(-1)[self.outside]
        return part

    def scatter(self, rows: Tensor, part: Tensor) -> None:
        """Write (b, t) into (B, T) rows, in place."""
        if not self.idle:
            rows.view(-1)[self.outside] = part.detach().reshape(-1)[self.inside].to(rows.dtype)


def stack_rows(rollouts: Sequence[Rollout], device: torch.device) -> Rows:
    """Concatenate the segments of each rollout and pad them to one (B, T).

    Raises ValueError if a segment starts with an action token, which no state precedes.
    """
    for segment in (s for rollout in rollouts for s in rollout):
        if segment.action_mask[0]:
            raise ValueError(
                f"trajectory {segment.trajectory_id} starts with an action token: a prompt must precede it"
            )
    lengths = np.array([sum(s.num_tokens for s in rollout) for rollout in rollouts])
    inside = np.flatnonzero(np.arange(lengths.max())[None] < lengths[:, None])
    shape = (len(rollouts), int(lengths.max()))

    def padded(field: str, dtype: npt.DTypeLike, fill: float = 0) -> Tensor:
        rows = np.full(shape, fill, dtype)
        rows.reshape(-1)[inside] = np.concatenate([getattr(s, field) for rollout in rollouts for s in rollout])
        return torch.from_numpy(rows).to(device)

    return Rows(
        token_ids=padded("token_ids", np.int64),
        action_mask=padded("action_mask", np.bool_),
        behavior_logprobs=padded("behavior_logprobs", np.float32),
        rewards=padded("rewards", np.float32),
        policy_versions=padded("policy_versions", np.int64, fill=-1),
        lengths=torch.from_numpy(lengths).to(device),
    )


def micro_batches(
    rollouts: Sequence[Rollout], rows: Rows, micro_batch_tokens: int, rank: int = 0, world_size: int = 1
) -> list[MicroBatch]:
    """Cut the rollouts' segments into micro-batches of at most ``micro_batch_tokens`` padded tokens.

    Segments are sorted by length; a longer one than the budget stands alone. Ranks take turns, and every rank gets
    the same number, filled up with idle ones.
    """
    segments = [s for rollout in rollouts for s in rollout]
    starts = _starts(rollouts, rows.token_ids.shape[1])
    order = sorted(range(len(segments)), key=lambda i: (segments[i].num_tokens, i))
    cuts = _cut([segments[i].num_tokens for i in order], micro_batch_tokens)
    groups = [order[a:b] for a, b in cuts]
    mine = groups[rank::world_size]
    device = rows.token_ids.device
    parts = [_micro_batch([segments[i] for i in g], [starts[i] for i in g], device) for g in mine]
    missing = -(-len(groups) // world_size) - len(mine)
    return parts + [_micro_batch([segments[order[0]]], [0], device, idle=True)] * missing


def _starts(rollouts: Sequence[Rollout], width: int) -> list[int]:
    """Where each segment begins in the flattened rows."""
    starts = []
    for row, rollout in enumerate(rollouts):
        position = row * width
        for segment in rollout:
            starts.append(position)
            position += segment.num_tokens
    return starts


def _cut(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Spans of ascending lengths, each as long as its padded size fits the budget."""
    spans = []
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > budget:
            spans.append((start, stop))
            start = stop
    return spans


def _micro_batch(
    segments: Sequence[Trajectory], starts: Sequence[int], device: torch.device, idle: bool = False
) -> MicroBatch:
    lengths = np.array([s.num_tokens for s in segments])
    columns = np.arange(lengths.max())
    real = columns < lengths[:, None]
    token_ids = np.zeros(real.shape, np.int64)
    token_ids[real] = np.concatenate([s.token_ids for s in segments])
    outside = (np.array(starts)[:, None] + columns)[real]
    ids, inside, places = (torch.from_numpy(x).to(device) for x in (token_ids, np.flatnonzero(real), outside))
    return MicroBatch(ids, inside, places, idle)


@dataclass(frozen=True)
class TrainingBatch:
    """B rollouts as rows, cut into this rank's micro-batches.

    ``trained`` (B, T) bool are the action tokens that enter the losses, ``num_action_tokens`` the denominator of
    every loss: all action tokens of the batch, over all micro-batches and ranks, trained or not. ``truncated`` (B,)
    bool marks rollouts that a limit cut.
    """

    rollouts: tuple[Rollout, ...]
    rows: Rows
    parts: tuple[MicroBatch, ...]
    trained: Tensor
    num_action_tokens: int
    truncated: Tensor

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        micro_batch_tokens: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> TrainingBatch:
        """Stack and cut rollouts. Every rank passes the same ones."""
        rows = stack_rows(rollouts, device)
        return cls(
            rollouts=tuple(rollouts),
            rows=rows,
            parts=tuple(micro_batches(rollouts, rows, micro_batch_tokens, rank, world_size)),
            trained=rows.action_mask,
            num_action_tokens=int(rows.action_mask.sum()),
            truncated=torch.tensor([r[0].outcome is Outcome.TRUNCATED for r in rollouts], device=device),
        )

    def at_end(self, rows: Tensor) -> Tensor:
        """What stands at each rollout's last token: (B, T) → (B,)."""
        return rows.gather(1, self.rows.lengths[:, None] - 1).squeeze(1)

    def blank(self) -> Tensor:
        """Zeros (B, T) float32."""
        return torch.zeros(self.rows.token_ids.shape, device=self.rows.token_ids.device)

    def without(self, tokens: Tensor) -> TrainingBatch:
        """The same batch with some tokens (B, T) out of the losses; they stay in the denominator."""
        return replace(self, trained=self.trained & ~tokens)

    def by_trajectory(self, columns: Mapping[str, Tensor]) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """Split columns (B, T) into one array per trajectory, of its own length."""
        arrays = {name: column.cpu().numpy() for name, column in columns.items()}
        split: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for row, rollout in enumerate(self.rollouts):
            start = 0
            for segment in rollout:
                stop = start + segment.num_tokens
                split[segment.trajectory_id] = {name: array[row, start:stop].copy() for name, array in arrays.items()}
                start = stop
        return split
