"""Preference by a reward model: one prompt, one reply, and a local sequence classifier that scores it.

The classifier is any Hugging Face folder for sequence classification. It is loaded once per worker process, in a
thread of its own, and scores the replies that wait for it together. Never downloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from sao_core.config import ConfigError, Section
from sao_core.environments.base import Environment, EnvironmentSpec, StepResult, Task, TaskSource, random_of
from sao_core.environments.batched import Batched
from sao_core.environments.jsonl import JsonlOptions, JsonlTasks
from sao_core.environments.numbered_tasks import NumberedTasks
from sao_core.environments.single_turn import SingleTurn
from sao_core.environments.writing.demonstrator import write
from sao_core.environments.writing.styles import STYLES, SUBJECTS
from sao_core.models.folder import check_classifier_folder
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

_HELD_OUT_ONE_IN = 8
_DEMONSTRATED_WORDS = (5, 14)
_Conversation = tuple[Message, ...]
_Logits = tuple[float, ...]


class RewardModelOptions(Section):
    """Settings of the `reward_model` environment."""

    model: str = Field(description="A local folder with a sequence classifier and its tokenizer.")
    path: str | None = Field(
        None,
        description="JSON Lines of prompts: rows with `prompt` or `messages`; empty: bundled ones, for small models.",
    )
    evaluation_path: str | None = Field(
        None, description="A file of the same form that is only evaluated; empty: some rows of `path` are."
    )
    held_out_fraction: float = Field(
        0.1, gt=0, lt=1, description="Share of the rows of `path` that is only evaluated, if there is no other file."
    )
    reads: Literal["conversation", "reply"] = Field(
        "conversation",
        description="What the classifier reads: prompt and reply by its tokenizer's chat template (without one, as a "
        "pair of texts), or the reply alone.",
    )
    label: int | None = Field(
        None, ge=0, description="Index of the label that is liked; empty: the only one, or 1 of two."
    )
    reward: Literal["probability", "logit"] = Field(
        "probability",
        description="The label's probability (sigmoid of a single logit, else softmax), or its logit, of which "
        "`logit_range` is scaled to 0 … 1.",
    )
    logit_range: tuple[float, float] = Field(
        (-5.0, 5.0), description="Logits that are worth 0 and 1; what lies outside counts as the nearer end."
    )
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:1`.")
    batch_size: int = Field(16, ge=1, description="Most replies that are scored at a time.")

    @field_validator("logit_range")
    @classmethod
    def _logit_range_ascends(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (all(map(math.isfinite, value)) and value[0] < value[1]):
            raise ValueError(f"must be two numbers, the lower first: got {list(value)}")
        return value


class RewardModel(SingleTurn):
    """One prompt, one turn."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options
        self._scorer = _scorer(options.model, options.device, options.reads, options.batch_size)

    async def reset(self, task: Task) -> _Conversation:
        """Open the conversation, and have the classifier loaded while the policy speaks."""
        self._scorer.begin()
        return await super().reset(task)

    async def judge(self, task: Task, reply: str) -> StepResult:
        """Have the reply scored."""
        options = self._options
        logits = await self._scorer((*task.data["messages"], Message(Role.ASSISTANT, reply)))
        reward = reward_of(options, logits)
        logit = logits[label_of(options, len(logits))]
        return StepResult(reward=reward, terminated=True, info={"reward_parts": {"logit": logit}})


def label_of(options: RewardModelOptions, labels: int) -> int:
    """Index of the label that is liked among so many; raises ConfigError if there is no such one."""
    if options.label is None and labels > 2:
        raise ConfigError(f"environment.options.label must name one of the classifier's {labels} labels: got none")
    label = labels - 1 if options.label is None else options.label
    if label >= labels:
        raise ConfigError(
            f"environment.options.label must be below the classifier's number of labels, {labels}: got {label}"
        )
    return label


def reward_of(options: RewardModelOptions, logits: Sequence[float]) -> float:
    """The reward, from 0 to 1; raises ValueError for logits that are no numbers."""
    if not all(map(math.isfinite, logits)):
        raise ValueError(f"the classifier's logits must be finite: got {list(logits)}")
    logit = logits[label_of(options, len(logits))]
    if options.reward == "logit":
        low, high = options.logit_range
        return min(max((logit - low) / (high - low), 0.0), 1.0)
    against = (0.0, logit) if len(logits) == 1 else logits
    top = max(against)
    return math.exp(logit - top) / sum(math.exp(other - top) for other in against)


@lru_cache(maxsize=4)
def _scorer(model: str, device: str, reads: str, batch_size: int) -> Batched[_Conversation, _Logits]:
    """The classifier of this process."""

    def start() -> Any:
        from sao_core.models.classifier import Classifier

        return Classifier(model, device, reply_only=reads == "reply").logits

    return Batched(start, batch_size)


class SubjectTasks(NumberedTasks):
    """The bundled prompts: short ones, about two things each; a pair of them is either trained on or evaluated."""

    def __init__(self, seed: int) -> None:
        super().__init__("reward_model", seed)

    def task(self, key: str) -> Task:
        """Build the prompt of a key; raises KeyError if this source did not give it out."""
        split, _ = self.split_and_number(key)
        rng = random_of("prompt", self._seed, key)
        while True:
            subject = rng.choice(SUBJECTS[0]), rng.choice(SUBJECTS[1])
            if (random_of("held out", *subject).randrange(_HELD_OUT_ONE_IN) == 0) == (split == "evaluation"):
                asked = Message(Role.USER, f"tell of {subject[0]} and {subject[1]}")
                return Task(key=key, difficulty="", data={"messages": (asked,), "subject": subject})


def demonstrations(options: RewardModelOptions, seed: int, count: int) -> Iterator[_Conversation]:
    """``count`` sentences in all styles about the bundled prompts; raises ConfigError for prompts of your own."""
    if options.path is not None:
        raise ConfigError(
            "`reward_model` has no demonstrator for prompts of your own: set warm_start.path to a JSONL of `messages`, "
            "or warm_start.enabled=false"
        )
    tasks = SubjectTasks(seed)
    for index in range(count):
        task = tasks.task(f"demonstration/{index}")
        rng = random_of("replies", seed, index)
        text = write(rng.choice(STYLES), task.data["subject"], _DEMONSTRATED_WORDS, rng)
        yield (*task.data["messages"], Message(Role.ASSISTANT, text))


def _make(options: Any, outside: Outside) -> Environment:
    return RewardModel(options)


def _tasks(options: Any, seed: int) -> TaskSource:
    label_of(options, check_classifier_folder(options.model))
    if options.path is None:
        return SubjectTasks(seed)
    rows = JsonlOptions(
        path=options.path, evaluation_path=options.evaluation_path, held_out_fraction=options.held_out_fraction
    )
    return JsonlTasks(rows, seed, answers=False)


SPEC = EnvironmentSpec(
    name="reward_model", options_model=RewardModelOptions, make=_make, tasks=_tasks, demonstrations=demonstrations
)
