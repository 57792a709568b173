"""Cases of an independent float64 implementation, one at a time or stacked into a padded batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "sao_math.json").read_text())
CASES: list[dict[str, Any]] = VECTORS["cases"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass
class Stacked:
    """Cases as one batch: padded to the longest, with ``hole`` wherever there is no action token."""

    cases: Sequence[dict[str, Any]]
    dtype: torch.dtype
    hole: float = float("nan")

    @property
    def mask(self) -> Tensor:
        return self._padded("action_mask", 0.0).bool()

    @property
    def counts(self) -> Tensor:
        return self.mask.sum(1)

    def inputs(self, name: str) -> Tensor:
        """(B, T), ``hole`` off the mask."""
        return torch.where(self.mask, self._padded(name, 0.0), self.hole)

    def expected(self, name: str) -> Tensor:
        """(B, T), 0 beyond the end of a case."""
        return self._padded(name, 0.0)

    def per_row(self, name: str) -> Tensor:
        """(B,) float64."""
        return torch.tensor([case[name] for case in self.cases], dtype=torch.float64)

    def mean(self, name: str) -> float:
        """The cases' means over action tokens as the mean over those of all."""
        return float((self.per_row(name) * self.counts).sum() / self.counts.sum())

    def _padded(self, name: str, fill: float) -> Tensor:
        length = max(len(case[name]) for case in self.cases)
        rows = [case[name] + [fill] * (length - len(case[name])) for case in self.cases]
        return torch.tensor(rows, dtype=self.dtype)


def batches(*keys: str) -> list[list[dict[str, Any]]]:
    """All cases one by one, and all that agree on ``keys`` together."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in CASES:
        together.setdefault(tuple(case[key] for key in keys), []).append(case)
    return [[case] for case in CASES] + list(together.values())


def assert_close(actual: Tensor | float, expected: Tensor | float, dtype: torch.dtype) -> None:
    """Within the tolerance of the vectors, relative to the size of what is expected where that is above 1."""
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    error = (torch.as_tensor(actual).double() - wanted).abs()
    assert bool((error <= TOLERANCE[dtype] * wanted.abs().clamp(min=1)).all()), f"off by {float(error.max()):.3g}"
