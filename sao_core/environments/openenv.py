"""Environments behind an OpenEnv server: one websocket session is one episode, and text stands for its messages.

Nothing of OpenEnv is installed here and no code of the environment runs here: the server decides what an action and an
observation are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit, urlunsplit

import httpx
from pydantic import Field, field_validator, model_validator

from sao_core.config import ConfigError, Section
from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    random_of,
)
from sao_core.environments.extras import require
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.environments.openenv_session import OpenEnvError, OpenEnvSession
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role


class OpenEnvOptions(Section):
    """Settings of the `openenv` environment."""

    url: str = Field(description="Where the server is, e.g. `http://localhost:8000`; its `/ws` is spoken to.")
    action_field: str | None = Field(
        None,
        description="Field of the environment's action that takes the whole reply, e.g. `message`; empty reads the "
        "action as a JSON object from the reply.",
    )
    action: dict[str, Any] = Field(default_factory=dict, description="Further fields that every action has.")
    observation_field: str | None = Field(
        None, description="Field of the observation that the policy reads; empty shows all of it as JSON."
    )
    reset: dict[str, Any] = Field(default_factory=dict, description="Further parameters of every reset.")
    instructions: str | None = Field(None, description="A system message; empty sends none.")
    max_turns: int = Field(50, ge=1, description="Turns, malformed ones included, after which an episode is cut.")
    reward_range: tuple[float, float] | None = Field(
        None, description="Smallest and largest return; empty sets no limit, since OpenEnv does not tell."
    )
    size: int | None = Field(
        None, ge=1, description="Distinct training seeds, gone through in shuffled epochs; empty never repeats one."
    )

    @field_validator("url")
    @classmethod
    def _url_is_one(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"must be an address such as http://localhost:8000: got {value!r}")
        return value

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> Self:
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range must hold the smaller number first: got {self.reward_range}")
        return self

    def address(self, scheme: str, path: str) -> str:
        """``path`` at the server, over ``http`` or ``ws``."""
        parts = urlsplit(self.url)
        secure = "s" if parts.scheme in ("https", "wss") else ""
        base = parts.path.rstrip("/").removesuffix("/ws")
        return urlunsplit((scheme + secure, parts.netloc, f"{base}{path}", "", ""))


class MalformedAction(ValueError):
    """A reply without an action; the message is written for the model to read."""


class OpenEnv(Environment):
    """One episode. A reply that is no action of the environment costs a turn and is told."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    def __init__(self, options: OpenEnvOptions) -> None:
        if options.reward_range is not None:
            self.reward_range = options.reward_range  # type: ignore[misc]
        self._options = options
        self._session: OpenEnvSession | None = None
        self._turns = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Begin an episode at the server."""
        if self._session is not None:
            raise RuntimeError("an environment serves one episode: make a new one")
        self._session = OpenEnvSession(self._options.address("ws", "/ws"))
        begun = await self._session.reset({**self._options.reset, "seed": task.data["seed"]})
        observation = Message(Role.USER, self._shown(begun))
        if self._options.instructions is None:
            return (observation,)
        return (Message(Role.SYSTEM, self._options.instructions), observation)

    async def step(self, action: str) -> StepResult:
        """Send the action that the reply holds."""
        if self._session is None:
            raise RuntimeError("reset comes before step")
        self._turns += 1
        cut = self._turns >= self._options.max_turns
        try:
            answer = await self._session.ask("step", self._action(action))
        except (MalformedAction, OpenEnvError) as error:
            if isinstance(error, OpenEnvError) and error.code != "VALIDATION_ERROR":
                raise
            told = (Message(Role.USER, f"error: {error}"),)
            return StepResult(told, truncated=cut, info={"reward_parts": {"malformed": 1.0}})
        done = bool(answer.get("done"))
        return StepResult(
            (Message(Role.USER, self._shown(answer)),),
            float(answer.get("reward") or 0.0),
            terminated=done,
            truncated=cut and not done,
            info={"reward_parts": {"malformed": 0.0}},
        )

    async def close(self) -> None:
        """End the episode."""
        if self._session is not None:
            await self._session.close()

    def _action(self, reply: str) -> dict[str, Any]:
        if self._options.action_field is not None:
            return {**self._options.action, self._options.action_field: reply.strip()}
        start, end = reply.find("{"), reply.rfind("}")
        try:
            value = json.loads(reply[start : end + 1]) if 0 <= start < end else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise MalformedAction("write one action as a JSON object")
        return {**self._options.action, **value}

    def _shown(self, answer: Mapping[str, Any]) -> str:
        observation = answer.get("observation") or {}
        field = self._options.observation_field
        if field is None:
            return json.dumps({name: value for name, value in observation.items() if name != "metadata"})
        if field not in observation:
            raise ConfigError(
                f"environment.options.observation_field names nothing in the observation: got `{field}`; there are: "
                f"{', '.join(observation)}"
            )
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value)


class OpenEnvTasks(NumberedTasks):
    """Seeds by number; those of training and evaluation differ."""

    splits = ("train", "evaluation")

    def __init__(self, options: OpenEnvOptions, seed: int) -> None:
        require("websockets", "openenv", "openenv")
        _check_server(options)
        super().__init__("openenv", seed, options.size)

    def task(self, key: str) -> Task:
        """The seed of a key; raises KeyError if this source did not give it out."""
        split, _ = self.split_and_number(key)
        drawn = random_of("openenv", self._seed, key).randrange(2**30)
        return Task(key, "", {"seed": drawn * len(self.splits) + self.splits.index(split)})


def _check_server(options: OpenEnvOptions) -> None:
    """Raise :class:`ConfigError` unless a server answers and takes ``action_field``."""
    try:
        schema = httpx.get(options.address("http", "/schema"), timeout=10, trust_env=False).raise_for_status().json()
        known = schema["action"].get("properties", {})
    except (httpx.HTTPError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"environment.options.url: no OpenEnv server answers at {options.url} ({error or type(error).__name__})"
        ) from error
    for name in (options.action_field, *options.action):
        if name is not None and known and name not in known:
            raise ConfigError(
                f"environment.options.action_field names nothing in the environment's action: got `{name}`; there "
                f"are: {', '.join(known)}"
            )


def _make(options: Any, outside: Outside) -> Environment:
    return OpenEnv(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return OpenEnvTasks(options, seed)


SPEC = EnvironmentSpec(name="openenv", options_model=OpenEnvOptions, make=_make, tasks=_tasks)
