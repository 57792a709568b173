"""Every data set of the package `reasoning_gym`, or several in a weighted mixture: one question, one turn.

The package makes the questions and scores the answers; this adapter says which question a key stands for, finds the
answer in a reply and keeps evaluation apart from training. It never lets a scorer run what a model wrote as code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from sao_core.config import ConfigError, Section
from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    random_of,
)
from sao_core.environments.extras import version_of
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.environments.one_thread import in_own_thread
from sao_core.environments.reasoning_gym_data import DataSets, Entry
from sao_core.environments.single_turn import SingleTurn
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

_TRIES = 64
"""Questions drawn for one key until one of its split turns up."""
_TASKS_PER_SPLIT = 2**23
_HELD_OUT_ONE_IN = 4
_MOST_LABELS = 16
_EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")
"""Where data sets with many right answers keep one of them."""


class ReasoningGymOptions(Section):
    """Settings of the `reasoning_gym` environment."""

    dataset: str | list[str] | dict[str, float] = Field(
        description="Name of a data set, e.g. `chain_sum`; or several as a list, or as a mapping of name to weight."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="The data set's own parameters, e.g. `{max_terms: 3}`; of several, a mapping for each by its name.",
    )
    size: int | None = Field(
        None,
        ge=1,
        le=_TASKS_PER_SPLIT,
        description="Distinct training questions, gone through in shuffled epochs; empty draws a new one each time.",
    )
    system: str | None = Field(None, description="A system message before the question; empty sends none.")
    instructions: str = Field(
        "Write only the final answer between <answer> and </answer>.",
        description="Follows the question, and says how to answer; empty for a model that knows.",
    )
    extract: Literal["last_line", "reply", "nothing"] = Field(
        "last_line", description="What is judged when a reply has no `<answer>…</answer>`; otherwise its last one is."
    )
    correct_at: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Reward 1 for a score of at least this and 0 for less; empty rewards with the score itself, "
        "which many data sets give in part.",
    )
    difficulty: str | None = Field(
        None,
        description="Name in an entry's metadata to report rewards by; empty takes the data set's name in a mixture, "
        "otherwise the first graded parameter that the entry tells.",
    )
    held_out_by: Literal["question", "index"] = Field(
        "question",
        description="`question` never trains on a text that may be evaluated: a hash holds out a quarter of all. "
        "`index` only draws them apart, for data sets with few different questions or very slow ones.",
    )

    @field_validator("dataset", mode="before")
    @classmethod
    def _dataset_is_names(cls, value: object) -> object:
        weights = list(value.values()) if isinstance(value, Mapping) else []
        names = [value] if isinstance(value, str) else list(value) if isinstance(value, list | Mapping) else []
        if not (
            names
            and all(isinstance(name, str) for name in names)
            and all(isinstance(weight, int | float) and weight > 0 for weight in weights)
        ):
            raise ValueError(f"must be a name, a list of names or a mapping of names to weights above 0: got {value!r}")
        return value


class ReasoningGym(SingleTurn):
    """One question. The reward is the data set's own score of the answer, from 0 to 1."""

    version: ClassVar[str] = f"1+{version_of('reasoning-gym')}"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options

    def state(self) -> dict[str, Any]:
        """The question, by its hash: a few data sets word it otherwise in another process."""
        if self._task is None:
            return {}
        return {"question": _fingerprint(self._task.data["entry"])}

    def opening(self, task: Task) -> tuple[Message, ...]:
        """Ask the question."""
        return _opening(task.data["entry"], self._options)

    async def restore(self, task: Task, state: dict[str, Any]) -> None:
        """Go on with the question, if this process asks the same one."""
        if state["question"] != _fingerprint(task.data["entry"]):
            raise ValueError(f"{task.key} is another question in this process")
        await super().restore(task, state)

    async def judge(self, task: Task, reply: str) -> StepResult:
        """Judge the reply."""
        answer, tagged = find_answer(reply, self._options.extract)
        score = float(await in_own_thread(task.data["score"], answer)) if answer else 0.0
        at = self._options.correct_at
        reward = score if at is None else float(score >= at)
        parts = {"score": score, "correct": float(score >= 1.0), "tagged": float(tagged)}
        return StepResult(reward=reward, terminated=True, info={"reward_parts": parts})


def find_answer(reply: str, otherwise: str) -> tuple[str, bool]:
    """The answer in a reply, and whether it stood in tags; ``otherwise`` says what to take if it did not."""
    for piece in reversed(reply.split("</answer>")[:-1]):
        _, tag, answer = piece.partition("<answer>")
        if tag:
            return answer.strip(), True
    if otherwise == "nothing":
        return "", False
    reply = reply.strip()
    return (reply if otherwise == "reply" else reply[reply.rfind("\n") + 1 :].strip()), False


class ReasoningGymTasks(NumberedTasks):
    """Questions by number: each split draws from random numbers of its own."""

    def __init__(self, options: ReasoningGymOptions, seed: int) -> None:
        self._options = options
        super().__init__("reasoning_gym", seed, options.size)
        self._data = DataSets(options.dataset, options.config, seed)

    def task(self, key: str) -> Task:
        """The question of a key; raises KeyError if this source did not give it out."""
        split, index = self.split_and_number(key)
        entry = self._entry(split, index % _TASKS_PER_SPLIT)
        return Task(key, self._difficulty(entry), {"entry": entry.fields, "score": entry.score})

    def _entry(self, split: str, index: int) -> Entry:
        first = (self.splits.index(split) * _TASKS_PER_SPLIT + index) * _TRIES
        for number in range(first, first + _TRIES):
            entry = self._data.entry(number)
            if self._options.held_out_by == "index" or _is_held_out(entry.fields) == (split == "evaluation"):
                return entry
        raise ConfigError(
            f"environment.options.dataset `{', '.join(self._data.names)}` has too few different questions to hold some "
            "out by their text: set environment.options.held_out_by to index"
        )

    def _difficulty(self, entry: Entry) -> str:
        metadata: Mapping[str, Any] = entry.fields["metadata"]
        name = self._options.difficulty
        if name is not None:
            if name not in metadata:
                raise ConfigError(
                    f"environment.options.difficulty names nothing in the metadata of `{entry.dataset}`: got `{name}`; "
                    f"there are: {', '.join(metadata)}"
                )
            return str(metadata[name])
        return entry.dataset if self._data.several else _graded(metadata)


def _graded(metadata: Mapping[str, Any]) -> str:
    """The first graded parameter that has few values, as this entry has it; empty if there is none."""
    difficulty = metadata.get("difficulty")
    if isinstance(difficulty, int | float | str):
        return f"{difficulty:g}" if isinstance(difficulty, float) else str(difficulty)
    if isinstance(difficulty, Mapping):
        for name, bounds in difficulty.items():
            value = metadata.get(name)
            if isinstance(value, int) and isinstance(bounds, list | tuple) and len(bounds) == 2:
                low, high = bounds
                if isinstance(low, int) and isinstance(high, int) and low <= value <= high < low + _MOST_LABELS:
                    return str(value)
    return ""


def _is_held_out(entry: Mapping[str, Any]) -> bool:
    return random_of("held out", entry["question"]).randrange(_HELD_OUT_ONE_IN) == 0


def _fingerprint(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{entry['question']}\x1f{entry['answer']}".encode()).hexdigest()[:16]


def _opening(entry: Mapping[str, Any], options: ReasoningGymOptions) -> tuple[Message, ...]:
    question = str(entry["question"])
    if options.instructions:
        question = f"{question.rstrip()}\n\n{options.instructions}"
    opening = Message(Role.USER, question)
    return (opening,) if options.system is None else (Message(Role.SYSTEM, options.system), opening)


def demonstrations(options: ReasoningGymOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` questions with a right answer; raises ConfigError for a data set that knows none."""
    tasks = ReasoningGymTasks(options, seed)
    for index in range(count):
        entry = tasks.task(f"demonstration/{index}").data["entry"]
        answer = _right_answer(entry)
        if answer is None:
            raise ConfigError(
                f"reasoning_gym's `{entry['metadata']['source_dataset']}` comes without answers, so there is nothing "
                "to imitate: start from a model that needs no supervised start, or from another data set"
            )
        yield (*_opening(entry, options), Message(Role.ASSISTANT, f"<answer>{answer}</answer>"))


def _right_answer(entry: Mapping[str, Any]) -> str | None:
    answers = (entry["answer"], *(entry["metadata"].get(name) for name in _EXAMPLES))
    answer = next((answer for answer in answers if answer is not None), None)
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


def _make(options: Any, outside: Outside) -> Environment:
    return ReasoningGym(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    return ReasoningGymTasks(options, seed)


SPEC = EnvironmentSpec(
    name="reasoning_gym",
    options_model=ReasoningGymOptions,
    make=_make,
    tasks=_tasks,
    demonstrations=demonstrations,
)
