"""The linear recursion under GAE, run backwards over masked tokens without a loop over them.

Masked tokens are moved together, where the recursion has one constant coefficient per row. Blocks of them
are then one product with a triangular matrix of its powers, and what a block receives from those behind
it is the same recursion over blocks. Stable for every coefficient in [0, 1]: no power above 1, no division.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Tokens per block: larger ones mean more arithmetic, smaller ones more levels."""


class BackwardScan:
    """H_i = x_i + c·H_(i+1), with 0 beyond the end, for rows that each have their own coefficient.

    Holds one matrix of powers per row and level: c⁰ … c³¹ between tokens, c³², c⁶⁴ … between blocks, and so on.
    """

    def __init__(self, coefficients: Tensor, length: int, dtype: torch.dtype) -> None:
        """Prepare rows of ``length`` with ``coefficients`` (B,), float64 in [0, 1]."""
        exponents = torch.arange(BLOCK, device=coefficients.device)
        distance = exponents[:, None] - exponents
        # Powers that would only make subnormal products are 0: those are slow, and nothing beside the first term.
        smallest = torch.finfo(dtype).tiny ** 0.75
        self.levels: list[Tensor] = []
        while True:
            powers = coefficients[:, None] ** exponents
            powers = torch.where(powers > smallest, powers, 0.0).to(dtype)
            self.levels.append(powers[:, distance.clamp(min=0)].tril())
            if length <= BLOCK:
                break
            coefficients = coefficients**BLOCK
            length = -(-length // BLOCK)
        self.coefficients = [matrix[:, 1:2, 0] for matrix in self.levels]

    def run(self, x: Tensor, rows: slice, out: Tensor, level: int = 0) -> Tensor:
        """Write H of ``rows`` to ``out`` and return it.

        Args:
            x: (b, n) for b rows, n a multiple of :data:`BLOCK`; overwritten.
            rows: which rows of the batch these are.
            out: (b, n).
            level: 0 for tokens, 1 for blocks of them, …
        """
        b, n = x.shape
        blocks, matrix = x.view(b, -1, BLOCK), self.levels[level][rows]
        num_blocks = n // BLOCK
        if num_blocks > 1:
            heads = x.new_zeros(b, padded(num_blocks))
            heads[:, :num_blocks] = torch.bmm(blocks, matrix[:, :, :1])[..., 0]
            received = self.run(heads, rows, torch.empty_like(heads), level + 1)[:, 1:num_blocks]
            blocks[:, :-1, -1].addcmul_(received, self.coefficients[level][rows])
        return torch.bmm(blocks, matrix, out=out.view(b, -1, BLOCK)).view(b, n)


class Packer:
    """Moves the masked tokens of up to B rows of T tokens together and back, one set of rows after another.

    In a row the masked tokens take places 1, 2, …; place 0 is for the others. Keeps its arrays: fresh ones for each set
    would cost more in page faults than the arithmetic does.
    """

    def __init__(self, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = padded(tokens + 2)  # place 0, and one behind the last token's for the end
        self._mask = torch.zeros(rows, padded(tokens), dtype=dtype, device=device)
        self._counts = torch.empty(rows, padded(tokens), dtype=dtype, device=device)
        self._bits = torch.empty(rows, tokens, dtype=_integer_like(dtype), device=device)
        self._places = torch.empty(rows, tokens, dtype=torch.int64, device=device)
        self._upto = torch.ones(BLOCK, BLOCK, dtype=dtype, device=device).triu()

    def place(self, mask: Tensor) -> None:
        """Give the tokens of the next rows their places: ``mask`` (b, T) bool, b ≤ B."""
        b, tokens = mask.shape
        self._rows = slice(0, b)
        self._bits[:b].copy_(mask.view(torch.int8)).neg_()
        self._mask[:b, :tokens] = mask.view(torch.int8)
        counts = self._counts[:b]
        torch.mm(self._mask[:b].view(-1, BLOCK), self._upto, out=counts.view(-1, BLOCK))
        per_block = counts[:, BLOCK - 1 :: BLOCK]
        upto = per_block.cumsum(1)
        self._ends = upto[:, -1:].long() + 1
        counts.view(b, -1, BLOCK).add_((upto - per_block)[..., None])
        self._places[:b] = self.keep(counts[:, :tokens], out=counts[:, :tokens])

    def keep(self, x: Tensor, out: Tensor) -> Tensor:
        """Write ``x`` (b, T) to ``out`` with 0 off the mask, whatever stands there.

        NaN · 0 would be NaN, and on a CPU an AND of bit patterns is several times faster than ``torch.where``.
        """
        integer = self._bits.dtype
        torch.bitwise_and(x.view(integer), self._bits[self._rows], out=out.view(integer))
        return out

    def pack(self, x: Tensor, end: Tensor, out: Tensor) -> Tensor:
        """Write the masked tokens of ``x`` (b, T) to their places in ``out`` (b, width), ``end`` (b, 1) behind them."""
        out.zero_().scatter_(1, self._places[self._rows], x).scatter_(1, self._ends, end)
        out[:, 0] = 0
        return out

    def unpack_next(self, packed: Tensor, out: Tensor) -> Tensor:
        """Write to ``out`` (b, T), for each masked token, what stands one place behind its own in ``packed``."""
        return torch.gather(packed[:, 1:], 1, self._places[self._rows], out=out)


def padded(n: int) -> int:
    """The smallest multiple of :data:`BLOCK` that is at least n."""
    return n + -n % BLOCK


def _integer_like(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype is torch.float32 else torch.int64
