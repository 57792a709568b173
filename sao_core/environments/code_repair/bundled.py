"""The bundled tasks by key: endless, or a fixed number that come back in shuffled epochs.

Evaluation asks for functions that are never trained on, not only for other mistakes.
"""

from __future__ import annotations

from functools import lru_cache

from sao_core.environments.base import Task, TaskSource, random_of, shuffled_index
from sao_core.environments.code_repair.catalogue import pool
from sao_core.environments.code_repair.generator import generate
from sao_core.environments.code_repair.levels import Level
from sao_core.environments.code_repair.repair_task import RepairTask

_SPLITS = {"train": False, "evaluation": True, "demonstration": False}
"""Whether the functions of a split are the held-out ones."""


class BundledTasks(TaskSource):
    """Generated repositories. A key is ``SPLIT/NUMBER``; levels take turns."""

    def __init__(self, levels: tuple[Level, ...], train_tasks: int | None, seed: int) -> None:
        self._levels, self._size, self._seed = levels, train_tasks, seed
        if train_tasks is not None:
            self.epoch_size = train_tasks

    def key_at(self, position: int) -> str:
        """``train/N``, in shuffled epochs if the number of training tasks is fixed."""
        if self._size is None:
            return f"train/{position}"
        return f"train/{shuffled_index(position, self._size, 'code_repair', self._seed)}"

    def evaluation_keys(self, count: int) -> list[str]:
        """``evaluation/0 …``, levels in equal shares."""
        return [f"evaluation/{index}" for index in range(count)]

    def task(self, key: str) -> Task:
        """The repository of a key; raises KeyError if this source did not give it out."""
        split, _, index = key.partition("/")
        if split not in _SPLITS or not (index.isascii() and index.isdigit()):
            raise KeyError(key)
        level = self._levels[int(index) % len(self._levels)]
        return Task(key, level.value, {"repair": _generated(self._seed, key, level, _SPLITS[split])})


@lru_cache(maxsize=64)
def _generated(seed: int, key: str, level: Level, held_out: bool) -> RepairTask:
    return generate(random_of("code_repair", seed, key), level, pool(held_out))
