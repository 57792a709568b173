"""Rows of a file as tasks: some held out for evaluation, the others gone through in shuffled epochs by weight."""

from __future__ import annotations

from collections.abc import Sequence

from sao_core.config import ConfigError
from sao_core.environments.base import Task, TaskSource, random_of
from sao_core.environments.walk import Walk


def hold_out(size: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of ``size`` tasks: those that are only evaluated, and in ascending order those to train on.

    At least one is held out, unless there is but one.
    """
    order = list(range(size))
    random_of("held out", seed).shuffle(order)
    count = min(size - 1, max(1, round(fraction * size)))
    return order[:count], sorted(order[count:])


class RowTasks(TaskSource):
    """Training ``rows`` with their ``weights``, and ``held_out`` ones; if None, the seed draws a share of ``rows``.

    ``path`` is the file that errors name, ``setting`` the one that names it. Raises ConfigError if nothing is left to
    train on or to hold out.
    """

    def __init__(
        self,
        rows: Sequence[Task],
        weights: Sequence[float],
        held_out: Sequence[Task] | None,
        held_out_fraction: float,
        *,
        path: str,
        seed: int,
        setting: str = "environment.options.path",
    ) -> None:
        self._tasks = {task.key: task for task in (*rows, *(held_out or ()))}
        order = list(range(len(rows)))
        if held_out is not None:
            self._held_out = [task.key for task in held_out]
            needed = 1
        else:
            chosen, order = hold_out(len(rows), held_out_fraction, seed)
            self._held_out = [rows[index].key for index in chosen]
            needed = 2
        if len(rows) < needed:
            raise ConfigError(
                f"{setting} needs at least {needed} row{'s' * (needed > 1)}, to train on "
                f"and, without an evaluation_path, to hold out: got {len(rows)} in {path}"
            )
        if not self._held_out:
            raise ConfigError("environment.options.evaluation_path needs at least 1 row: got 0")
        self._training = [rows[index].key for index in order]
        self._walk = Walk([weights[index] for index in order], "rows", seed)
        self.epoch_size = len(self._walk)

    def key_at(self, position: int) -> str:
        """Every training row once per epoch if weights are equal, each epoch in another order."""
        return self._training[self._walk[position]]

    def evaluation_keys(self, count: int) -> list[str]:
        """At most ``count`` held-out rows."""
        return self._held_out[:count]

    def task(self, key: str) -> Task:
        """The row of a key; raises KeyError if there is none."""
        return self._tasks[key]
