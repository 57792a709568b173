"""Online preference: a short text about a subject, in a style of the writer's choice; which one is liked changes.

Reward = quality × style, both 0 or 1: the text is good, and it is in the style that is preferred at this point of the
training (paper: academic, cute, chuunibyou, classical). The prompt never says which one that is, so a policy has to
find out by trying, and again after each change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from sao_core.config import Section
from sao_core.environments.base import Environment, EnvironmentSpec, StepResult, Task, TaskSource, random_of
from sao_core.environments.single_turn import SingleTurn
from sao_core.environments.writing.demonstrator import write
from sao_core.environments.writing.model_judge import JudgeOptions, ModelJudge
from sao_core.environments.writing.rules import RuleJudge
from sao_core.environments.writing.styles import DESCRIPTIONS, STYLES, SUBJECTS
from sao_core.environments.writing.verdict import Assignment, Judge
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

_DECLARED = re.compile(rf"\s*\**({'|'.join(STYLES)})\**\s*:\**", re.IGNORECASE)
_HELD_OUT_ONE_IN = 8


class Phase(Section):
    """What is preferred from some prompt on."""

    from_prompt: int = Field(ge=0, description="Position of the first prompt of the phase.")
    prefers: str = Field(description="The style that is liked.")
    pool: tuple[str, ...] = Field(
        ("academic", "cute", "chuunibyou"), min_length=2, description="The styles that the prompt offers."
    )

    @model_validator(mode="after")
    def _styles_are_known(self) -> Self:
        unknown = [style for style in self.pool if style not in STYLES]
        if unknown:
            raise ValueError(f"pool must hold styles of {', '.join(STYLES)}: got {unknown[0]!r}")
        if len(set(self.pool)) < len(self.pool):
            raise ValueError(f"pool must hold each style once: got {list(self.pool)}")
        if self.prefers not in self.pool:
            raise ValueError(f"prefers must be a style of its pool {list(self.pool)}: got {self.prefers!r}")
        return self


class WritingOptions(Section):
    """Settings of the `writing` environment."""

    schedule: tuple[Phase, ...] = Field(
        (
            Phase(from_prompt=0, prefers="cute"),
            Phase(from_prompt=1024, prefers="chuunibyou"),
            Phase(from_prompt=2304, prefers="classical", pool=("classical", "cute", "chuunibyou")),
        ),
        min_length=1,
        description="What is preferred from which training prompt on, and the pool to choose from; prompts are counted "
        "from 0, those of value pretraining come first.",
    )
    evaluate_phase: int | None = Field(
        None,
        ge=0,
        description="Index of the phase whose preference evaluations judge by; empty: all of them in equal shares, "
        "told apart by their difficulty label, which is the preferred style.",
    )
    words: tuple[int, int] = Field(
        (5, 14), description="Fewest and most words of the text. The default suits a model whose tokens are letters."
    )
    instructions: bool = Field(
        False, description="Explain task and styles in the system message; a warm-started model knows them already."
    )
    judge: JudgeOptions | None = Field(
        None,
        description="A model that judges, e.g. `{url: https://host/v1, model: NAME}` (also `attempts`, `timeout_s`, "
        "`max_tokens`); its key comes from the environment variable SAO_CHAT_API_KEY. Empty: rules on words.",
    )
    demonstrated: dict[str, float] = Field(
        default_factory=dict,
        description="Weight of a style among the demonstrations, where its pool offers it; 1 where it is not named.",
    )

    @field_validator("words")
    @classmethod
    def _words_are_bounds(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 3 <= value[0] < value[1]:
            raise ValueError(f"must be two bounds of at least 3 words, the lower first: got {list(value)}")
        return value

    @field_validator("demonstrated")
    @classmethod
    def _demonstrated_are_weights_of_styles(cls, value: dict[str, float]) -> dict[str, float]:
        for style, weight in value.items():
            if style not in STYLES:
                raise ValueError(f"must name styles of {', '.join(STYLES)}: got {style!r}")
            if not 0 <= weight < float("inf"):
                raise ValueError(f"must hold weights of at least 0: got {weight} for {style}")
        return value

    @model_validator(mode="after")
    def _phases_follow_each_other(self) -> Self:
        starts = [phase.from_prompt for phase in self.schedule]
        if starts[0] != 0 or any(later <= start for start, later in pairwise(starts)):
            raise ValueError(f"schedule must start at prompt 0 and go on in ascending order: got {starts}")
        if self.evaluate_phase is not None and self.evaluate_phase >= len(self.schedule):
            raise ValueError(
                f"evaluate_phase must be an index of the schedule, 0 … {len(self.schedule) - 1}: "
                f"got {self.evaluate_phase}"
            )
        for phase in self.schedule:
            if not any(self.weight_of(style) for style in phase.pool):
                raise ValueError(f"demonstrated must leave a style of the pool {list(phase.pool)} with a weight over 0")
        return self

    def weight_of(self, style: str) -> float:
        """How often a style is demonstrated, relative to the others of a pool."""
        return self.demonstrated.get(style, 1.0)

    def phase_at(self, position: int) -> int:
        """Index of the phase that a training prompt belongs to."""
        return max(index for index, phase in enumerate(self.schedule) if phase.from_prompt <= position)


class Writing(SingleTurn):
    """One text, one turn."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def judge(self, task: Task, reply: str) -> StepResult:
        """Have the text judged. A writer that declares a style has to keep to it."""
        assignment: Assignment = task.data["assignment"]
        declared, text = split_declaration(reply)
        verdict = await self._judge.judge(text, assignment)
        style = verdict.style if declared in (None, verdict.style) else None
        quality, liked = float(verdict.fault is None), float(style == task.data["prefers"])
        parts = {"quality": quality, "style": liked}
        parts |= {f"wrote_{name}": float(name == style) for name in assignment.pool}
        info = {"reward_parts": parts, "fault": verdict.fault, "declared": declared}
        return StepResult(reward=quality * liked, terminated=True, info=info)


def split_declaration(action: str) -> tuple[str | None, str]:
    """The style that a reply names before a colon at its start, if it does, and the text itself."""
    match = _DECLARED.match(action)
    return (match.group(1).casefold(), action[match.end() :].strip()) if match else (None, action.strip())


class WritingTasks(TaskSource):
    """Subjects from a seed; a pair of subjects is either trained on or evaluated, in every phase."""

    def __init__(self, options: WritingOptions, seed: int) -> None:
        self._options = options
        self._seed = seed

    def key_at(self, position: int) -> str:
        """``train/POSITION``: a key keeps its phase, whoever asks and when."""
        return f"train/{position}"

    def evaluation_keys(self, count: int) -> list[str]:
        """``evaluation/PHASE/0 …``: of one phase, or of all in equal shares."""
        phase, phases = self._options.evaluate_phase, len(self._options.schedule)
        if phase is not None:
            return [f"evaluation/{phase}/{index}" for index in range(count)]
        return [f"evaluation/{index % phases}/{index // phases}" for index in range(count)]

    def task(self, key: str) -> Task:
        """Build the task of a key; raises KeyError if this source did not give it out."""
        split, *numbers = key.split("/")
        if not all(number.isdecimal() for number in numbers):
            raise KeyError(key)
        if split == "train" and len(numbers) == 1:
            phase = self._options.phase_at(int(numbers[0]))
        elif split in ("evaluation", "demonstration") and len(numbers) == 2:
            phase = int(numbers[0])
        else:
            raise KeyError(key)
        if phase >= len(self._options.schedule):
            raise KeyError(key)
        subject = self._subject(key if split != "evaluation" else f"evaluation/{numbers[1]}", split == "evaluation")
        chosen = self._options.schedule[phase]
        messages = _messages(chosen.pool, subject, self._options)
        prompt = "\n".join(message.content for message in messages)
        return Task(
            key=key,
            difficulty=chosen.prefers,
            data={
                "messages": messages,
                "assignment": Assignment(chosen.pool, subject, self._options.words, prompt),
                "prefers": chosen.prefers,
            },
        )

    def _subject(self, key: str, held_out: bool) -> tuple[str, str]:
        rng = random_of("subject", self._seed, key)
        while True:
            subject = rng.choice(SUBJECTS[0]), rng.choice(SUBJECTS[1])
            if (random_of("held out", *subject).randrange(_HELD_OUT_ONE_IN) == 0) == held_out:
                return subject


def _messages(pool: tuple[str, ...], subject: tuple[str, ...], options: WritingOptions) -> tuple[Message, ...]:
    if not options.instructions:
        return Message(Role.SYSTEM, " ".join(pool)), Message(Role.USER, " ".join(subject))
    styles = "\n".join(f"- {style}: {DESCRIPTIONS[style]}" for style in pool)
    system = (
        f"Write a short text of {options.words[0]} to {options.words[1]} words about the subject that you are given; "
        f"mention all of it. Choose exactly one of these styles and keep to it throughout:\n{styles}\n"
        "Begin with the name of the style and a colon, then the text. Write nothing else."
    )
    return Message(Role.SYSTEM, system), Message(Role.USER, f"Subject: {' and '.join(subject)}")


def demonstrations(options: WritingOptions, seed: int, count: int) -> Iterator[tuple[Message, ...]]:
    """``count`` texts by a demonstrator without a preference of its own: styles are drawn by ``demonstrated``.

    All phases in equal shares, so that every style is known before it is liked. Raises ConfigError if texts of that
    length are more than it can write.
    """
    tasks = WritingTasks(options, seed)
    phases = len(options.schedule)
    for index in range(count):
        task = tasks.task(f"demonstration/{index % phases}/{index}")
        assignment: Assignment = task.data["assignment"]
        rng = random_of("writer", seed, index)
        (style,) = rng.choices(assignment.pool, [options.weight_of(style) for style in assignment.pool])
        text = write(style, assignment.subject, assignment.words, rng)
        yield (*task.data["messages"], Message(Role.ASSISTANT, f"{style}: {text}"))


def _make(options: Any, outside: Outside) -> Environment:
    return Writing(RuleJudge() if options.judge is None else ModelJudge(options.judge, outside.chat))


def _tasks(options: Any, seed: int) -> TaskSource:
    return WritingTasks(options, seed)


SPEC = EnvironmentSpec(
    name="writing", options_model=WritingOptions, make=_make, tasks=_tasks, demonstrations=demonstrations
)
