"""Any gymnasium environment that can be told and played in text: observations are read, actions are named.

An episode belongs to one thread of its own, in which the environment is made, stepped and closed. Which text stands
for which observation and action is in `gymnasium_spaces`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sao_core.config import ConfigError, Section
from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    load_object,
    random_of,
)
from sao_core.environments.extras import require, version_of
from sao_core.environments.gymnasium_spaces import (
    MOST_NUMBERS,
    MalformedAction,
    action_of,
    actions_of,
    numbers_in,
    observed,
    said_as,
    without_ansi,
)
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.environments.one_thread import OneThread
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role


class GymnasiumOptions(Section):
    """Settings of the `gymnasium` environment."""

    id: str | None = Field(None, description="A registered environment, e.g. `FrozenLake-v1`.")
    make: str | None = Field(
        None, description="Your own as `module:function`, called with `kwargs`, instead of a registered one."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments that it is made with.")
    observe: Literal["space", "render"] = Field(
        "space",
        description="What the policy reads: the observation by its space, or what the environment draws as text "
        "(it is made with `render_mode: ansi`).",
    )
    actions: tuple[str, ...] = Field(
        (), description="Names of the actions 0, 1, … of a discrete space; empty numbers them."
    )
    instructions: str | None = Field(
        None,
        description="The system message; by default one that says how to name an action, and an empty text sends none.",
    )
    max_turns: int = Field(100, ge=1, description="Turns, malformed ones included, after which an episode is cut.")
    malformed_reward: float = Field(
        0.0,
        le=0,
        description="Reward of a reply that names no action. Below zero where every step costs something, since a "
        "policy that says nothing would pay nothing.",
    )
    reward_range: tuple[float, float] | None = Field(
        None,
        description="Smallest and largest return, outside of which a rollout has failed; by default the environment's "
        "own `reward_range`, or no limit.",
    )
    size: int | None = Field(
        None, ge=1, description="Distinct training seeds, gone through in shuffled epochs; empty never repeats one."
    )
    demonstrator: str | None = Field(
        None,
        description="Your own policy as `module:function`, (observation, environment) → action, for a supervised "
        "start; by default random actions, which teach how to name one.",
    )

    @model_validator(mode="after")
    def _one_environment(self) -> Self:
        if (self.id is None) == (self.make is None):
            raise ValueError(f"set either id or make: got id={self.id!r}, make={self.make!r}")
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range must hold the smaller number first: got {self.reward_range}")
        return self


def open_environment(options: GymnasiumOptions) -> Any:
    """Make the environment; raises :class:`ConfigError` if there is none such or text cannot play it."""
    gymnasium = require("gymnasium", "gymnasium", "gymnasium")
    kwargs = dict(options.kwargs)
    if options.observe == "render":
        kwargs["render_mode"] = "ansi"
    if options.make is not None:
        made = load_object(options.make, "environment.options.make")(**kwargs)
        if not isinstance(made, gymnasium.Env):
            raise ConfigError(f"environment.options.make must return a gymnasium.Env: got {type(made).__name__}")
    else:
        try:
            made = gymnasium.make(options.id, **kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"environment.options.id `{options.id}`: {_one_line(error)}: got {kwargs}") from error
    try:
        _check(made, options)
    except ConfigError:
        made.close()
        raise
    return made


def _check(made: Any, options: GymnasiumOptions) -> None:
    space = made.action_space
    if options.actions:
        wanted = int(space.n) if type(space).__name__ == "Discrete" else None
        folded = {name.casefold() for name in options.actions}
        if len(options.actions) != wanted or len(folded) != wanted:
            raise ConfigError(
                "environment.options.actions must give each action of a discrete space a name of its own: got "
                f"{len(folded)} for {space}"
            )
    if options.observe == "render":
        modes = made.metadata.get("render_modes", [])
        if made.render_mode != "ansi" or "ansi" not in modes:
            raise ConfigError(
                "environment.options.observe is render, but the environment draws no text: its render modes are "
                f"{', '.join(modes) or 'none'}"
            )
    elif (numbers := numbers_in(made.observation_space)) > MOST_NUMBERS:
        raise ConfigError(
            f"an observation has {numbers} numbers, more than the {MOST_NUMBERS} that a prompt may spell out: set "
            "environment.options.observe to render, or environment.options.make to a function that wraps it"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Played:
    """An environment, what it was asked and what can be read of it; used from one thread."""

    def __init__(self, options: GymnasiumOptions) -> None:
        self.options = options
        self.made = open_environment(options)
        self.text = ""

    def begin(self, seed: int) -> str:
        observation, _ = self.made.reset(seed=seed)
        return self._read(observation)

    def step(self, action: Any) -> tuple[float, bool, bool]:
        observation, reward, terminated, truncated, _ = self.made.step(action)
        self._read(observation)
        return float(reward), bool(terminated), bool(truncated)

    def _read(self, observation: Any) -> str:
        self.observation = observation
        if self.options.observe == "render":
            self.text = without_ansi(str(self.made.render()))
        else:
            self.text = observed(self.made.observation_space, observation)
        return self.text

    @property
    def instructions(self) -> str:
        if self.options.instructions is not None:
            return self.options.instructions
        return f"Write `action: ` and {actions_of(self.made.action_space, self.options.actions)}."


class Gymnasium(Environment):
    """One episode. A reply that names no action costs a turn and is told; the environment does not move."""

    version: ClassVar[str] = f"1+{version_of('gymnasium')}"
    reward_range: ClassVar[tuple[float, float]] = (float("-inf"), float("inf"))

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        self._thread: OneThread | None = None
        self._played: _Played | None = None
        self._actions: list[str] = []
        self._turns = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Make the environment and read its first observation."""
        played = await self._begin(task)
        return _opening(played)

    async def step(self, action: str) -> StepResult:
        """Take the action that the reply names."""
        if self._played is None or self._thread is None:
            raise RuntimeError("reset comes before step")
        self._turns += 1
        cut = self._turns >= self._options.max_turns
        played = self._played
        try:
            meant = action_of(action, played.made.action_space, self._options.actions)
        except MalformedAction as error:
            told = (Message(Role.USER, f"{error}\n\n{played.text}"),)
            parts = {"malformed": 1.0}
            return StepResult(told, self._options.malformed_reward, truncated=cut, info={"reward_parts": parts})
        reward, terminated, truncated = await self._thread.run(played.step, meant)
        self._actions.append(action)
        return StepResult(
            (Message(Role.USER, played.text),),
            reward,
            terminated=terminated,
            truncated=(truncated or cut) and not terminated,
            info={"reward_parts": {"malformed": 0.0}},
        )

    def state(self) -> dict[str, Any]:
        """The replies that moved it, and what it shows now: another process plays them again."""
        shown = "" if self._played is None else self._played.text
        return {"actions": list(self._actions), "turns": self._turns, "shown": _digest(shown)}

    async def restore(self, task: Task, state: dict[str, Any]) -> None:
        """Play the same actions from the same seed; raises ValueError if that does not lead to the same place."""
        played = await self._begin(task)
        assert self._thread is not None
        for action in state["actions"]:
            meant = action_of(action, played.made.action_space, self._options.actions)
            await self._thread.run(played.step, meant)
            self._actions.append(action)
        self._turns = state["turns"]
        if _digest(played.text) != state["shown"]:
            raise ValueError("the same seed and actions led elsewhere: the environment is not deterministic")

    async def close(self) -> None:
        """Close the environment, in its thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            await thread.run(self._close)
        finally:
            thread.stop()

    def _close(self) -> None:
        if self._played is not None:
            self._played.made.close()

    async def _begin(self, task: Task) -> _Played:
        if self._thread is not None:
            raise RuntimeError("an environment serves one episode: make a new one")
        self._thread = OneThread("gymnasium")
        await self._thread.run(self._make, int(task.data["seed"]))
        assert self._played is not None
        limits = self._options.reward_range or getattr(self._played.made.unwrapped, "reward_range", None)
        if limits is not None:
            self.reward_range = limits  # type: ignore[misc]
        return self._played

    def _make(self, seed: int) -> None:
        self._played = _Played(self._options)
        self._played.begin(seed)


class GymnasiumTasks(NumberedTasks):
    """Seeds by number; those of training, evaluation and demonstration differ."""

    def __init__(self, options: GymnasiumOptions, seed: int) -> None:
        open_environment(options).close()
        super().__init__("gymnasium", seed, options.size)

    def task(self, key: str) -> Task:
        """The seed of a key; raises KeyError if this source did not give it out."""
        split, _ = self.split_and_number(key)
        drawn = random_of("gymnasium", self._seed, key).randrange(2**29)
        return Task(key, "", {"seed": drawn * len(self.splits) + self.splits.index(split)})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _opening(played: _Played) -> tuple[Message, ...]:
    observation = Message(Role.USER, played.text)
    return (Message(Role.SYSTEM, played.instructions), observation) if played.instructions else (observation,)


def demonstrations(options: GymnasiumOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` whole episodes of the demonstrator, or their first ``max_turns`` turns."""
    act = (
        _random_action
        if options.demonstrator is None
        else load_object(options.demonstrator, "environment.options.demonstrator")
    )
    tasks = GymnasiumTasks(options, seed)
    for index in range(count):
        start = int(tasks.task(f"demonstration/{index}").data["seed"])
        played = _Played(options)
        try:
            played.begin(start)
            played.made.action_space.seed(start)
            messages = [*_opening(played)]
            for _ in range(options.max_turns):
                action = act(played.observation, played.made)
                messages.append(Message(Role.ASSISTANT, said_as(action, played.made.action_space, options.actions)))
                _, terminated, truncated = played.step(action)
                if terminated or truncated:
                    break
                messages.append(Message(Role.USER, played.text))
            yield tuple(messages if messages[-1].role is Role.ASSISTANT else messages[:-1])
        finally:
            played.made.close()


def _random_action(observation: Any, made: Any) -> Any:
    return made.action_space.sample()


def _make(options: Any, outside: Outside) -> Environment:
    return Gymnasium(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return GymnasiumTasks(options, seed)


SPEC = EnvironmentSpec(
    name="gymnasium", options_model=GymnasiumOptions, make=_make, tasks=_tasks, demonstrations=demonstrations
)
