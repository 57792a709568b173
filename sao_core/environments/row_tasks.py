"""Rows of a file as tasks: some held out for evaluation, the others gone through in shuffled epochs by weight."""

from __future__ import annotations

from collections.abc import Sequence

from sao_core.config import ConfigError
from sao_core.environments.base import Task, TaskSource, random_of
from sao_core.environments.walk import Walk


class RowTasks(TaskSource):
    """Training ``rows`` with their ``weights``, and ``held_out`` ones; if None, the seed draws a share of ``rows``.

    ``path`` is the file that errors name. Raises ConfigError if nothing is left to train on or to hold out.
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
    ) -> None:
        self._tasks = {task.key: task for task in (*rows, *(held_out or ()))}
        order = list(range(len(rows)))
        if held_out is not None:
            self._held_out = [task.key for task in held_out]
            needed = 1
        else:
            random_of("held out", seed).shuffle(order)
            count = min(len(rows) - 1, max(1, round(held_out_fraction * len(rows))))
            self._held_out = [rows[index].key for index in order[:count]]
            order = sorted(order[count:])
            needed = 2
        if len(rows) < needed or not self._held_out:
            raise ConfigError(
                f"environment.options.path needs at least {needed} row{'s' * (needed > 1)}, to train on "
                f"and, without an evaluation_path, to hold out: got {len(rows)} in {path}"
            )
        self._training = [rows[index].key for index in order]
        self._walk = Walk([weights[index] for index in order], "jsonl", seed)
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
