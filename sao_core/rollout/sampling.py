"""Drawing one token for each row of logits, with randomness that belongs to the row and not to the batch.

The k-th draw of a session is a hash of its seed and k (splitmix64), so a rollout's tokens do not depend on which
others ran beside it. Log-probabilities are the policy's own. Nothing here knows slots, caches or models.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The ``counters``-th number of each seed's sequence, both (B,) → (B,) in the open interval (0, 1).

    splitmix64 (Steele, Lea, Flood 2014), its upper 32 bits centred in their cell so that neither end occurs.
    """
    z = seeds + (counters + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32


def policy_logprobs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-softmax in float32 of logits ÷ temperature: (B, V) and (B,) → (B, V). The learner's exact formula."""
    return torch.log_softmax(logits.float() / temperature.unsqueeze(1), dim=-1)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw from (B, V) log-probabilities (unnormalised ones too) with (B,) uniforms in (0, 1) → (B,) ids.

    The first id whose cumulative probability, in float64, exceeds u · total: one of probability 0 is never drawn.
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = uniform * cumulative[:, -1]
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def truncate(logprobs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Keep the ``top_k`` likeliest (0 = all), of them the fewest whose mass reaches ``top_p``; the rest become −inf.

    For evaluation only: (B, V), (B,), (B,) → (B, V). Top-p is of the distribution that top-k leaves, renormalised.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    kept = (rank < top_k.unsqueeze(1)) | (top_k.unsqueeze(1) == 0)
    mass = torch.where(kept, ordered.double().exp(), 0.0)
    before = mass.cumsum(dim=-1) - mass
    kept &= (before < top_p.unsqueeze(1) * mass.sum(dim=-1, keepdim=True)) | (top_p.unsqueeze(1) >= 1)
    kept[:, 0] = True
    return logprobs.masked_fill(~torch.zeros_like(kept).scatter_(1, order, kept), -torch.inf)
