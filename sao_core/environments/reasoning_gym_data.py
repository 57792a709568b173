"""The entries of reasoning_gym by number: which of its data sets, made with which seed, and its scorer.

Entry N is the same wherever it is made. Nothing here knows prompts, splits or rewards.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sao_core.config import ConfigError, nearest
from sao_core.environments.base import random_of
from sao_core.environments.extras import require
from sao_core.environments.harmless import is_harmless
from sao_core.environments.reasoning_gym_ordered import OrderedEntries

log = logging.getLogger(__name__)

_BLOCK = 1024
"""Entries of one instance of a data set: some make all of theirs at once, some read a file."""
_SEEDS = 2**31
_INSTANCES = 8
_OURS = ("seed", "size")
EVALUATING = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose scorer evaluates the answer as Python code."""
UNORDERED = frozenset(
    {
        "codeio",
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Data sets that draw from Python sets or from the generator of the process, so that their seed does not fix them."""
COMPARED = frozenset({"game_of_life_halting"})
"""Data sets whose scorer takes any answer for right, so that the answers are compared instead."""
_NOT_FINITE = re.compile(r"(?i)\b(nan|inf|infinity)\b")


@dataclass(frozen=True)
class Entry:
    """One question of a data set."""

    dataset: str
    fields: Mapping[str, Any]
    """As the package gives it: ``question``, ``answer``, ``metadata``."""
    instance: Any

    def score(self, answer: str) -> float:
        """The data set's score of ``answer``, from 0 to 1; 0 for one that it cannot read."""
        answer = answer.strip()
        if _NOT_FINITE.search(answer) and answer != self.fields["answer"]:
            return 0.0  # comparisons within a tolerance may take `nan` for right
        if self.dataset in COMPARED:
            return float(answer.casefold() == str(self.fields["answer"]).casefold())
        if self.dataset in EVALUATING and answer != self.fields["answer"] and not self._may_be_evaluated(answer):
            answer = ""
        try:
            score = float(self.instance.score_answer(answer, self.fields))
        except Exception as error:  # the package's scorers trust their input: each raises something else
            log.debug("%s cannot score %r: %s: %s", self.dataset, answer[:80], type(error).__name__, error)
            return 0.0
        return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0

    def _may_be_evaluated(self, answer: str) -> bool:
        return is_harmless(answer) or answer in self.fields["metadata"].get("valid_answers", ())


class DataSets:
    """One data set, or several drawn by weight."""

    def __init__(self, dataset: str | list[str] | Mapping[str, float], config: Mapping[str, Any], seed: int) -> None:
        """Checks names and parameters; raises ConfigError."""
        require("reasoning_gym", "reasoning_gym", "reasoning-gym")
        self._factory = importlib.import_module("reasoning_gym.factory")
        names = [dataset] if isinstance(dataset, str) else list(dataset)
        for name in names:
            self._check_name(name)
        self.names = tuple(names)
        self.several = not isinstance(dataset, str)
        self._weights = [dataset[name] if isinstance(dataset, Mapping) else 1.0 for name in names]
        self._parameters = self._parameters_of(config)
        self._offset = random_of("reasoning_gym", seed).randrange(_SEEDS // _BLOCK) * _BLOCK
        self._instances: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._ordered = OrderedEntries()
        for name in names:
            self._create(name, self._offset)

    def entry(self, number: int) -> Entry:
        """Entry ``number`` in 0 … 2³¹; two numbers share no random numbers."""
        place = (self._offset + number) % _SEEDS
        name = self.names[0]
        if len(self.names) > 1:
            (name,) = random_of("data set", place).choices(self.names, self._weights)
        seed, index = place - place % _BLOCK, place % _BLOCK
        instance = self._instance(name, seed)
        if name in UNORDERED:
            made_with = {"seed": seed, "size": _BLOCK, **self._parameters[name]}
            return Entry(name, self._ordered.entry(name, index, made_with), instance)
        return Entry(name, instance[index], instance)

    def _instance(self, name: str, seed: int) -> Any:
        known = self._instances
        if (name, seed) not in known:
            if len(known) >= _INSTANCES * len(self.names):
                known.popitem(last=False)
            known[name, seed] = self._create(name, seed)
        known.move_to_end((name, seed))
        return known[name, seed]

    def _create(self, name: str, seed: int) -> Any:
        parameters = self._parameters[name]
        try:
            return self._factory.create_dataset(name, seed=seed, size=_BLOCK, **parameters)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"environment.options.config of `{name}` is refused by reasoning_gym: "
                f"{error or type(error).__name__}: got {parameters}"
            ) from error

    def _check_name(self, name: str) -> None:
        known = sorted(self._factory.DATASETS.keys() - {"composite"})
        if name not in known:
            raise ConfigError(f"unknown environment.options.dataset `{name}`{nearest(name, known)}")

    def _parameters_of(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Parameters of each data set; raises ConfigError naming one that it does not have."""
        by_name = dict(config) if self.several else {self.names[0]: config}
        for name, parameters in by_name.items():
            if name not in self.names:
                raise ConfigError(
                    f"environment.options.config has parameters by the name of a data set: got `{name}`"
                    f"{nearest(name, list(self.names))}"
                )
            if not isinstance(parameters, Mapping):
                raise ConfigError(f"environment.options.config of `{name}` must be a mapping: got {parameters!r:.60}")
            fields = dataclasses.fields(self._factory.DATASETS[name][1])
            known = [field.name for field in fields if field.name not in _OURS]
            for parameter in parameters:
                if parameter not in known:
                    rest = nearest(str(parameter), known)
                    raise ConfigError(f"environment.options.config: `{name}` has no parameter `{parameter}`{rest}")
        return {name: dict(by_name.get(name, {})) for name in self.names}
