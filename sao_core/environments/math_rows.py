r"""Mathematical problems from a JSON Lines file, in the shapes in which AIME, MATH and GSM8K are published.

A row has ``problem`` or ``question``, and ``answer`` (a number or a text), or else a ``solution`` that boxes one. Names
of fields may be in capitals. Every error names file, line and field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sao_core.config import ConfigError
from sao_core.environments.base import Task
from sao_core.environments.math_answers import boxed
from sao_core.jsonl_rows import read_rows, weight_of


def read_problems(path: str, split: str, setting: str) -> tuple[list[Task], list[float]]:
    """The rows as tasks with keys ``SPLIT/NUMBER``, and their weights; raises ConfigError for the first bad one."""
    tasks, weights = [], []
    for index, (where, row) in enumerate(read_rows(Path(path), setting)):
        fields = {name.lower(): value for name, value in row.items() if value is not None}
        data = {"problem": _problem(fields, where), "answer": _answer(fields, where)}
        if "id" in fields:
            data["id"] = str(fields["id"])
        difficulty = fields.get("difficulty", fields.get("level", ""))
        if not isinstance(difficulty, str | int | float):
            raise ConfigError(f"{where}: field `difficulty` must be a text or a number: got {difficulty!r:.60}")
        tasks.append(Task(f"{split}/{index}", str(difficulty), data))
        weights.append(weight_of(fields, where))
    return tasks, weights


def _problem(fields: Mapping[str, Any], where: str) -> str:
    for name in ("problem", "question"):
        if name in fields:
            text = fields[name]
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(f"{where}: field `{name}` must be a text: got {text!r:.60}")
            return text
    raise ConfigError(f"{where}: field `problem` (or `question`) is missing; there are: {', '.join(fields) or 'none'}")


def _answer(fields: Mapping[str, Any], where: str) -> str:
    answer = fields.get("answer")
    if answer is None:
        solution = fields.get("solution")
        answer = boxed(solution) if isinstance(solution, str) else None
        if answer is None:
            raise ConfigError(f"{where}: field `answer` is missing, and no field `solution` boxes one")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ConfigError(f"{where}: field `answer` must be a text or a number: got {answer!r:.60}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = str(answer).rpartition("####")[2].strip()  # GSM8K: reasoning, then the mark, then the answer
    if not text:
        raise ConfigError(f"{where}: field `answer` is empty")
    return text
