"""Entries of data sets that draw on more than their seed: made in a process where all randomness is fixed.

Run as a module it is that process.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

from sao_core.environments.side_process import SideProcess, SideProcessFailed


class OrderedEntries:
    """Asks the process."""

    def __init__(self) -> None:
        self._process = SideProcess(["env", "PYTHONHASHSEED=0", sys.executable, "-m", __name__])

    @property
    def pid(self) -> int | None:
        """Of the process, if it was started."""
        return self._process.pid

    def entry(self, dataset: str, index: int, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entry ``index`` of a data set made with ``parameters``. Raises RuntimeError if it cannot be made."""
        try:
            fields: Mapping[str, Any] = self._process.ask((dataset, index, dict(parameters))).result()
        except SideProcessFailed as error:
            raise RuntimeError(f"entry {index} of `{dataset}` cannot be made: {error}") from error
        return fields


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the package prints must not come between the replies
    from reasoning_gym.factory import create_dataset

    instances: dict[str, Any] = {}
    while True:
        try:
            number, (dataset, index, parameters) = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        which = f"{dataset} {sorted(parameters.items())}"
        fields, error = None, None
        try:
            if which not in instances:
                random.seed(dataset)
                instances = {which: create_dataset(dataset, **parameters)}
            random.seed(f"{dataset}/{index}")
            fields = instances[which][index]
        except Exception as raised:  # the parent raises it, whatever it is
            error = f"{type(raised).__name__}: {raised}"
        pickle.dump((number, fields, error), replies)
        replies.flush()


if __name__ == "__main__":
    _serve()
