"""The bundled tasks by key: endless, or a fixed number that come back in shuffled epochs.

Evaluation asks for functions that are never trained on, not only for other mistakes.
"""

from __future__ import annotations

from functools import lru_cache

from sao_core.environments.base import Task, random_of
from sao_core.environments.code_repair.catalogue import pool
from sao_core.environments.code_repair.generator import generate
from sao_core.environments.code_repair.levels import Level
from sao_core.environments.code_repair.repair_task import RepairTask
from sao_core.environments.numbered_tasks import NumberedTasks


class BundledTasks(NumberedTasks):
    """Generated repositories; levels take turns."""

    def __init__(self, levels: tuple[Level, ...], train_tasks: int | None, seed: int) -> None:
        super().__init__("code_repair", seed, train_tasks)
        self._levels = levels

    def task(self, key: str) -> Task:
        """The repository of a key; raises KeyError if this source did not give it out."""
        split, index = self.split_and_number(key)
        level = self._levels[index % len(self._levels)]
        return Task(key, level.value, {"repair": _generated(self._seed, key, level, split == "evaluation")})


@lru_cache(maxsize=64)
def _generated(seed: int, key: str, level: Level, held_out: bool) -> RepairTask:
    return generate(random_of("code_repair", seed, key), level, pool(held_out))
