"""What an environment is: single-use episodes, keyed tasks, and the specification that names both.

Rollout workers make one :class:`Environment` per rollout, give it one :class:`Task` and close it.
The flow walks a :class:`TaskSource` by position. Nothing here knows a tokenizer or a model.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ValidationError

from sao_core.config import ConfigError, explain, nearest
from sao_core.outside import Outside
from sao_core.trajectory import Message


@dataclass(frozen=True)
class Task:
    """One prompt: what to ask, and what the environment needs to judge the answer."""

    key: str
    difficulty: str
    """A label to report rewards by; empty where the source has none."""
    data: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    """Which environment it is for, where a source mixes several: the name that its trajectories carry."""


@dataclass(frozen=True)
class StepResult:
    """What came of one action."""

    observation: tuple[Message, ...] = ()
    """Messages that the policy reads before its next turn; nobody reads those of the last step."""
    reward: float = 0.0
    """Reward of this turn; the score of a rollout is the sum over its turns."""
    terminated: bool = False
    """The task ended by itself: answered, solved or lost."""
    truncated: bool = False
    """The environment's own budget ended it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """``reward_parts`` (a mapping of floats) is summed and stored with the trajectory; of the rest, texts and finite
    numbers are, the last of a name (e.g. the final ``patch``), and anything else is dropped."""


class Environment(ABC):
    """One episode. Single-use: ``reset`` (or ``restore``) once, ``step`` until it ends, ``close`` always.

    The methods are coroutines, so a slow tool costs the other rollouts of a worker nothing.
    """

    version: ClassVar[str]
    """Changes whenever the same actions could earn another reward."""
    reward_range: ClassVar[tuple[float, float]]
    """Smallest and largest score; a rollout outside it has failed."""
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Functions that the policy may call, in the JSON schema of OpenAI's `tools`; the chat template shows them."""

    @property
    def shown_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the prompt of this episode shows, asked for after ``reset``; all, unless overridden."""
        return self.tools

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Start on ``task``; returns the messages that open the conversation."""

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Take the text of one turn of the policy, without its end-of-turn token."""

    def state(self) -> Any | None:
        """What :meth:`restore` needs to go on from here, as JSON values; None (the default) if it cannot.

        Asked for before each step of a worker, so it must be cheap: an identifier of a snapshot, not the snapshot.
        """
        return None

    async def restore(self, task: Task, state: Any) -> None:
        """Instead of ``reset``, in a fresh environment: go on where ``state`` was taken, perhaps in another process.

        Called only with what :meth:`state` gave; if it raises, the rollout starts anew.
        """
        raise NotImplementedError(f"{type(self).__name__} has a state but no way to restore it")

    async def close(self) -> None:
        """Free what the episode holds; called once, also after a failure."""
        return


class TaskSource(Protocol):
    """Tasks by key. The same options and seed give the same tasks in the same order, in any process.

    A finite source has an attribute ``epoch_size``: after how many positions it has gone round.
    """

    def key_at(self, position: int) -> str:
        """The key of the training prompt at ``position`` ≥ 0; a finite source goes round in shuffled epochs."""
        ...

    def evaluation_keys(self, count: int) -> list[str]:
        """``count`` held-out keys (fewer if there are fewer), always the same ones; none is ever trained on."""
        ...

    def task(self, key: str) -> Task:
        """The task of a key that this source gave out; raises KeyError for another."""
        ...


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment as a recipe names it: its settings, episodes, tasks and demonstrations."""

    name: str
    options_model: type[BaseModel]
    make: Callable[[Any, Outside], Environment]
    """Parsed options, and what the machine lends → a fresh episode."""
    tasks: Callable[[Any, int], TaskSource]
    """Parsed options and seed → the source of tasks."""
    demonstrations: Callable[[Any, int, int], Iterable[tuple[Message, ...]]] | None = None
    """Parsed options, seed and count → conversations for a supervised start; None if there is no demonstrator."""
    choose: Callable[[Any, Task], tuple[EnvironmentSpec, Any]] | None = None
    """For a mixture: parsed options and a task → the environment that it is for, and that one's parsed options."""

    def parse_options(self, values: Mapping[str, Any]) -> Any:
        """Check ``environment.options``; raises :class:`ConfigError` with one line."""
        try:
            return self.options_model.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(f"environment.options of `{self.name}`: {explain(error, self.options_model)}") from None

    def episode(self, options: Any, task: Task, outside: Outside) -> Environment:
        """A fresh episode for ``task``."""
        spec, options = (self, options) if self.choose is None else self.choose(options, task)
        return spec.make(options, outside)


_BUILT_IN = {
    "calculator": "sao_core.environments.calculator:SPEC",
    "code_repair": "sao_core.environments.code_repair:SPEC",
    "external_agent": "sao_core.environments.external:SPEC",
    "gymnasium": "sao_core.environments.gymnasium_text:SPEC",
    "jsonl": "sao_core.environments.jsonl:SPEC",
    "mixture": "sao_core.environments.mixture:SPEC",
    "openenv": "sao_core.environments.openenv:SPEC",
    "python_math": "sao_core.environments.python_math:SPEC",
    "reasoning_gym": "sao_core.environments.reasoning_gym:SPEC",
    "reward_model": "sao_core.environments.reward_model:SPEC",
    "sorting": "sao_core.environments.sorting:SPEC",
    "verifiers": "sao_core.environments.verifiers_tasks:SPEC",
    "writing": "sao_core.environments.writing:SPEC",
}


def names() -> tuple[str, ...]:
    """The environments that come with the package."""
    return tuple(_BUILT_IN)


def get(name: str) -> EnvironmentSpec:
    """The specification called ``name``: a built-in, or ``module:attribute`` of your own.

    Raises :class:`ConfigError` naming the nearest built-in if there is none.
    """
    path = _BUILT_IN.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"unknown environment.name `{name}`{nearest(name, list(_BUILT_IN))} (your own: `module:attribute`)"
        )
    spec = load_object(path, "environment.name")
    if not isinstance(spec, EnvironmentSpec):
        raise ConfigError(f"environment.name must name an EnvironmentSpec: got {type(spec).__name__} at `{path}`")
    return spec


def load_object(path: str, setting: str) -> Any:
    """Import ``module:attribute``; raises :class:`ConfigError` that names ``setting`` and what was missing."""
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(f"{setting} must look like `module:attribute`: got `{path}`")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{setting} names a module that cannot be imported: `{module_name}` ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{setting}: module `{module_name}` has no `{attribute}`") from None


def random_of(*parts: object) -> random.Random:
    """A random generator that depends on ``parts`` only: not on the process, the platform or the hash seed."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def shuffled_index(position: int, size: int, *seed: object) -> int:
    """Index in ``range(size)`` at ``position`` of an endless walk: every epoch is a new permutation.

    The last permutations are remembered, since callers walk forward.
    """
    epoch, offset = divmod(position, size)
    return _permutation(size, epoch, seed)[offset]


@lru_cache(maxsize=4)
def _permutation(size: int, epoch: int, seed: tuple[object, ...]) -> tuple[int, ...]:
    order = list(range(size))
    random_of("epoch", epoch, *seed).shuffle(order)
    return tuple(order)
