"""Several environments in one run: each prompt belongs to one of them, drawn by weight, and is judged by it alone.

Keys are `PART/KEY`. A rollout carries the name of its part, by which rewards are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import Field, field_validator

from sao_core.config import ConfigError, Section
from sao_core.environments.base import Environment, EnvironmentSpec, Task, TaskSource, get, random_of
from sao_core.outside import Outside
from sao_core.trajectory import Message

BLOCK = 100
"""Positions after which every part has had exactly its share."""


class Part(Section):
    """One environment of a mixture."""

    environment: str = Field("", description="`environment.name` of the part; empty: the part's own name.")
    weight: float = Field(1.0, gt=0, description="Share of the prompts, relative to the other parts.")
    options: dict[str, Any] = Field(default_factory=dict, description="The environment's own settings.")


class MixtureOptions(Section):
    """Settings of the `mixture` environment."""

    parts: dict[str, Part] = Field(description="Name → environment, weight and options; the name is reported by.")

    @field_validator("parts")
    @classmethod
    def _parts_can_be_told_apart(cls, value: dict[str, Part]) -> dict[str, Part]:
        if len(value) < 2:
            raise ValueError(f"must name at least two environments: got {list(value)}")
        if len(value) > BLOCK:
            raise ValueError(f"must name at most {BLOCK} environments: got {len(value)}")
        for name, part in value.items():
            if not name or "/" in name:
                raise ValueError(f"must have names without a slash: got {name!r}")
            if (part.environment or name) == "mixture":
                raise ValueError("must not hold a mixture: list its parts here")
        return value


class MixtureTasks(TaskSource):
    """The tasks of all parts."""

    def __init__(self, options: MixtureOptions, seed: int) -> None:
        self._seed = seed
        self._sources: dict[str, TaskSource] = {}
        for name, part in options.parts.items():
            spec, own = _of(name, part)
            self._sources[name] = spec.tasks(own, seed)
        self._counts = _shares({name: part.weight for name, part in options.parts.items()}, BLOCK)
        self._places: tuple[int, list[tuple[str, int]]] = (-1, [])

    def key_at(self, position: int) -> str:
        """In every :data:`BLOCK` positions each part comes as often as its weight says, in an order of its own."""
        block, offset = divmod(position, BLOCK)
        if block != self._places[0]:
            self._places = block, self._draw(block)
        name, nth = self._places[1][offset]
        return f"{name}/{self._sources[name].key_at(nth)}"

    def evaluation_keys(self, count: int) -> list[str]:
        """Held-out keys of every part by its share, at least one of each."""
        shares = _shares({name: float(n) for name, n in self._counts.items()}, max(count, len(self._counts)))
        return [
            f"{name}/{key}" for name, source in self._sources.items() for key in source.evaluation_keys(shares[name])
        ]

    def task(self, key: str) -> Task:
        """The task of a part; raises KeyError for a key of none."""
        name, _, own = key.partition("/")
        if name not in self._sources:
            raise KeyError(key)
        task = self._sources[name].task(own)
        return Task(key, task.difficulty, task.data, environment=name)

    def _draw(self, block: int) -> list[tuple[str, int]]:
        """(part, position in the part) of each position of a block."""
        names = [name for name, n in self._counts.items() for _ in range(n)]
        random_of("mixture", self._seed, block).shuffle(names)
        places = {name: iter(range(block * n, (block + 1) * n)) for name, n in self._counts.items()}
        return [(name, next(places[name])) for name in names]


def _shares(weights: dict[str, float], total: int) -> dict[str, int]:
    """``total`` divided by weight, each part getting at least one (largest remainders)."""
    rest = total - len(weights)
    exact = {name: weight / sum(weights.values()) * rest for name, weight in weights.items()}
    counts = {name: 1 + int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: exact[name] - int(exact[name]), reverse=True)
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _of(name: str, part: Part) -> tuple[EnvironmentSpec, Any]:
    """The environment of a part and its parsed options; raises ConfigError that names the part."""
    try:
        spec = get(part.environment or name)
        return spec, spec.parse_options(part.options)
    except ConfigError as error:
        raise ConfigError(f"environment.options.parts.{name}: {error}") from None


def choose(options: MixtureOptions, task: Task) -> tuple[EnvironmentSpec, Any]:
    """The environment that a task is for, and its parsed options."""
    return _of(task.environment, options.parts[task.environment])


def demonstrations(options: MixtureOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """Demonstrations of the parts that have a demonstrator, by weight; raises ConfigError if none has one."""
    able = {name: _of(name, part) for name, part in options.parts.items()}
    able = {name: made for name, made in able.items() if made[0].demonstrations is not None}
    if not able:
        raise ConfigError("no part of the mixture has a demonstrator: set warm_start.path, or warm_start.enabled=false")
    shares = _shares({name: options.parts[name].weight for name in able}, max(count, len(able)))
    told = [
        conversation
        for name, (spec, own) in able.items()
        if spec.demonstrations is not None
        for conversation in islice(spec.demonstrations(own, seed, shares[name]), shares[name])
    ]
    random_of("mixed demonstrations", seed).shuffle(told)
    return iter(told[:count])


def _make(options: Any, outside: Outside) -> Environment:
    raise TypeError("a mixture has no episodes of its own: ask for EnvironmentSpec.episode")


SPEC = EnvironmentSpec(
    name="mixture",
    options_model=MixtureOptions,
    make=_make,
    tasks=MixtureTasks,
    demonstrations=demonstrations,
    choose=choose,
)
