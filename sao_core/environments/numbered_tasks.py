"""Tasks that are made from a number and a seed, as most environments that draw their own have them."""

from __future__ import annotations

from typing import ClassVar

from sao_core.environments.base import TaskSource, shuffled_index


class NumberedTasks(TaskSource):
    """Keys are ``SPLIT/NUMBER``; subclasses make the :meth:`task` of one, each split's from random numbers of its own.

    ``label`` seeds the order of epochs. ``epoch_size`` training tasks come back in shuffled epochs; None never ends.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "evaluation", "demonstration")

    def __init__(self, label: str, seed: int, epoch_size: int | None = None) -> None:
        self._label, self._seed = label, seed
        self.epoch_size = epoch_size

    def key_at(self, position: int) -> str:
        """``train/POSITION``; of a fixed number of tasks, every one once per epoch."""
        size = self.epoch_size
        return f"train/{position if size is None else shuffled_index(position, size, self._label, self._seed)}"

    def evaluation_keys(self, count: int) -> list[str]:
        """``evaluation/0 …``, so that what goes by number (levels, lengths) has equal shares."""
        return [f"evaluation/{index}" for index in range(count)]

    def split_and_number(self, key: str) -> tuple[str, int]:
        """The parts of a key; raises KeyError if this source did not give it out."""
        split, _, number = key.partition("/")
        if split not in self.splits or not (number.isascii() and number.isdecimal()):
            raise KeyError(key)
        return split, int(number)
