"""The order in which a finite set of tasks is gone through, from a seed: shuffled epochs, by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sao_core.environments.base import random_of


class Walk:
    """An endless walk over items with weights; an epoch has as many positions as there are items.

    In every epoch an item comes as often as its share of all weights makes of the epoch's length, rounded down or up
    (systematic sampling with an offset of the epoch's own), so with equal weights exactly once. Positions can be asked
    for in any order; the last epoch is remembered, since callers walk forward.
    """

    def __init__(self, weights: Sequence[float], *seed: object) -> None:
        shares = np.asarray(weights, np.float64)
        self._upto = np.cumsum(shares) * (len(shares) / shares.sum())
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Positions of an epoch."""
        return len(self._upto)

    def __getitem__(self, position: int) -> int:
        """Index of the item at ``position`` ≥ 0."""
        epoch, offset = divmod(position, len(self))
        if epoch != self._epoch:
            self._order, self._epoch = self._draw(epoch), epoch
        return int(self._order[offset])

    def _draw(self, epoch: int) -> np.ndarray:
        rng = random_of("epoch", epoch, *self._seed)
        # Away from 0 and 1, where rounding could let an item of equal weight come twice.
        points = np.arange(len(self)) + rng.uniform(0.01, 0.99)
        order = np.minimum(np.searchsorted(self._upto, points), len(self) - 1)
        return order[np.array(rng.sample(range(len(self)), len(self)))]
