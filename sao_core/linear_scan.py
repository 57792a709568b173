"""The linear recursion under GAE, run backwards over masked tokens without a loop over them.

Tokens are taken in blocks. Within one, suffix sums of terms weighted by powers of the coefficient are one
product with a triangular matrix; what a block receives from those behind it is found over groups of
blocks, groups of groups, and so on. Knows no rewards and no values.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONG_BLOCK, SHORT_BLOCK = 32, 8
"""Tokens per block. Powers of the coefficient within one must fit in the dtype; long ones are faster."""

LONG_BLOCK_COEFFICIENT = 0.25
"""Smallest coefficient for long blocks in float32: its powers 0.25**±16 are exact to 1e-6."""

SMALLEST_COEFFICIENT = {torch.float32: 2.0**-25, torch.float64: 1e-16}
"""A smaller one, 0 included, is taken for this one: the dtype cannot tell the sums apart."""

GROUP = 16
"""Blocks per group."""


class Workspace:
    """Arrays that scans of up to B rows of T tokens work in, one scan after another.

    Made once because fresh arrays for each scan cost more in page faults than the arithmetic does.
    """

    def __init__(self, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = tokens + -tokens % LONG_BLOCK
        self.bits = torch.empty(rows, tokens, dtype=_integer_like(dtype), device=device)
        self.terms, self.counts, self.powers = torch.zeros(3, rows, self.width, dtype=dtype, device=device)


def _integer_like(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype is torch.float32 else torch.int64


def keep_(x: Tensor, bits: Tensor) -> Tensor:
    """Set ``x`` to 0 in place where ``bits`` (integers of its width, all bits or none) has none, whatever stands there.

    NaN · 0 would be NaN; and on a CPU an AND of bit patterns is several times faster than ``torch.where``.
    """
    x.view(bits.dtype).bitwise_and_(bits)
    return x


def sums_behind(
    first: Tensor, second: Tensor, mask: Tensor, coefficient: Tensor, weight: Tensor, end: Tensor, work: Workspace
) -> Tensor:
    """H at the next masked token, for every token, of the recursion over masked tokens

        H_t = c·first_t + weight·second_t + c·H_next(t),    H beyond the last one = end

    Let n_t count the masked tokens of its block up to and including t, and q = first + (weight/c)·second. What the block
    adds to H_next(t) is Σ_(s>t) c^(n_s)·q_s / c^(n_t): no power in the sum exceeds the divisor, so no digits
    are lost, however small c and however long the gaps.

    Args:
        first: (B, T) float32 or float64; not read off the mask.
        second: (B, T), likewise.
        mask: (B, T) bool.
        coefficient: (B,) float64, c in [0, 1].
        weight: (B,) float64.
        end: (B,) float64.
        work: where to work; ``work.bits[:B]`` holds the bits of ``mask`` afterwards.

    Returns:
        (B, T) in the dtype of ``first``, a view of ``work``. Off the mask, next(t) is the next masked token as well.
    """
    rows, tokens = first.shape
    dtype = first.dtype
    terms, counts, powers, bits = work.terms[:rows], work.counts[:rows], work.powers[:rows], work.bits[:rows]
    coefficient = coefficient.clamp(min=SMALLEST_COEFFICIENT[dtype])
    is_long = dtype is torch.float64 or bool((coefficient >= LONG_BLOCK_COEFFICIENT).all())
    size = LONG_BLOCK if is_long else SHORT_BLOCK
    rate = coefficient.log2().to(dtype)[:, None]
    ones = torch.ones(size, size, dtype=dtype, device=first.device)

    bits.copy_(mask.view(torch.int8)).neg_()
    torch.addcmul(first, second, (weight / coefficient).to(dtype)[:, None], out=terms[:, :tokens])
    keep_(terms[:, :tokens], bits)
    counts[:, :tokens] = mask.view(torch.int8)
    torch.mm(counts.view(-1, size), ones.triu(), out=powers.view(-1, size))
    block_counts = powers[:, size - 1 :: size].clone()
    powers.sub_(size / 2).mul_(rate).exp2_()  # c^(n_t − size/2): centred, to use exponents of both signs
    terms.mul_(powers)
    sums = counts
    torch.mm(terms.view(-1, size), ones.tril(-1), out=sums.view(-1, size))
    totals = (terms[:, ::size] + sums[:, ::size]) * (coefficient ** (size / 2)).to(dtype)[:, None]
    received = _received(block_counts, totals, rate, end.to(dtype)[:, None])
    passed_on = (powers[:, size - 1 :: size] * received)[..., None]
    sums.view(rows, -1, size).add_(passed_on)
    return sums.div_(powers)[:, :tokens]


def _received(counts: Tensor, totals: Tensor, rate: Tensor, end: Tensor) -> Tensor:
    """What each of n blocks receives: from the next one its own total and c^count times what that receives.

    Args:
        counts: (B, n), masked tokens of each block.
        totals: (B, n), what each passes on of its own.
        rate: (B, 1), log2 c.
        end: (B, 1), what the last one receives.

    Returns:
        (B, n)
    """
    rows, n = counts.shape
    if n == 1:
        return end
    missing = -n % GROUP
    counts = torch.nn.functional.pad(counts, (0, missing)).view(rows, -1, GROUP)
    totals = torch.nn.functional.pad(totals, (0, missing)).view(rows, -1, GROUP)
    rate3 = rate[..., None]
    upto = counts.cumsum(-1)
    before = upto - counts
    group_totals = ((before * rate3).exp2_() * totals).sum(-1)
    group_received = _received(upto[..., -1], group_totals, rate, end)
    gaps = (before[..., None, :] - upto[..., None]).clamp_(min=0)  # masked tokens between block i and block j > i
    inner = torch.matmul(gaps.mul_(rate3[..., None]).exp2_().triu_(1), totals[..., None]).squeeze(-1)
    outer = ((upto[..., -1:] - upto) * rate3).exp2_() * group_received[..., None]
    return (inner + outer).view(rows, -1)[:, :n]
