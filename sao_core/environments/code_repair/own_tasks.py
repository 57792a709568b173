"""Your own repair tasks: rows of a JSON Lines file, or a folder with a folder per task; every error says where.

A row has ``id``, ``files``, ``hidden_tests`` and, if there are any, visible ``tests`` (each path → text), a
``statement`` of what is wrong, a ``difficulty`` and a ``weight``. A task's folder has the folders ``files``,
``hidden_tests`` and ``tests``, and the rest of the row in ``task.json``; its name is the id.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sao_core.config import ConfigError, nearest
from sao_core.environments.base import Task
from sao_core.environments.code_repair.options import CodeRepairOptions
from sao_core.environments.code_repair.repair_task import HiddenTests, RepairTask
from sao_core.environments.code_repair.test_names import named_tests
from sao_core.environments.code_repair.workspace import Refused, check_path
from sao_core.environments.row_tasks import RowTasks
from sao_core.jsonl_rows import read_rows, weight_of

_FOLDERS = ("files", "tests", "hidden_tests")
_FIELDS = ("id", *_FOLDERS, "statement", "difficulty", "weight")
_REQUEST = (
    "Something is wrong in this repository. Mend it: tests that you cannot see decide whether it is mended, and "
    "changing tests does not help. Call submit when you are done."
)


class OwnTasks(RowTasks):
    """The tasks of ``options.path``. Keys are ``own/ID``; reading checks every task."""

    def __init__(self, options: CodeRepairOptions, path: str, seed: int) -> None:
        if options.test_runner == "pytest" and importlib.util.find_spec("pytest") is None:
            raise ConfigError(
                "environment.options.test_runner `pytest` needs a package that is not installed: pip install pytest"
            )
        tasks, weights = _read(path, "environment.options.path", options)
        held = None
        if options.evaluation_path is not None:
            held, _ = _read(options.evaluation_path, "environment.options.evaluation_path", options)
            both = {task.key for task in tasks} & {task.key for task in held}
            if both:
                raise ConfigError(
                    f"environment.options.evaluation_path must hold other tasks than path: both have "
                    f"{min(both).removeprefix('own/')}"
                )
        super().__init__(tasks, weights, held, options.held_out_fraction, path=path, seed=seed)


def _read(path: str, setting: str, options: CodeRepairOptions) -> tuple[list[Task], list[float]]:
    tasks: dict[str, Task] = {}
    weights = []
    place = Path(path).expanduser()
    for where, row in _folders(place) if place.is_dir() else read_rows(place, setting):
        task, weight = _task(row, where, options)
        if task.key in tasks:
            raise ConfigError(f"{where}: `id` must be another for each task: {row['id']!r:.60} comes again")
        tasks[task.key] = task
        weights.append(weight)
    return list(tasks.values()), weights


def _folders(place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of the folder and the row that it stands for."""
    for folder in sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")):
        row: dict[str, Any] = {"id": folder.name}
        described = folder / "task.json"
        if described.is_file():
            try:
                given = json.loads(described.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{described}: not valid JSON ({error})") from None
            if not isinstance(given, dict) or {*_FOLDERS, "id"} & given.keys():
                raise ConfigError(f"{described}: it must be an object of statement, difficulty and weight")
            row |= given
        row |= {name: _texts(folder / name) for name in _FOLDERS if (folder / name).is_dir()}
        yield str(folder), row


def _texts(folder: Path) -> dict[str, str]:
    """The files of a folder; what an interpreter has left there is no part of it."""
    texts = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            try:
                texts[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise ConfigError(f"{path}: it must be UTF-8 text") from None
    return texts


def _task(row: dict[str, Any], where: str, options: CodeRepairOptions) -> tuple[Task, float]:
    unknown = [name for name in row if name not in _FIELDS]
    if unknown:
        raise ConfigError(f"{where}: there is no field `{unknown[0]}`{nearest(unknown[0], list(_FIELDS))}")
    name = row.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: `id` must be a text: got {name!r:.60}")
    statement = row.get("statement", _REQUEST)
    if not isinstance(statement, str):
        raise ConfigError(f"{where}: `statement` must be a text: got {statement!r:.60}")
    weight = weight_of(row, where)
    files, tests, hidden = (_files(row, field, where) for field in _FOLDERS)
    for field, needed in (("files", files), ("hidden_tests", hidden)):
        if not needed:
            raise ConfigError(f"{where}: `{field}` must hold at least one file")
    twice = files.keys() & tests.keys()
    if twice:
        raise ConfigError(f"{where}: `files` and `tests` must not both hold {min(twice)}")
    visible = {path: text for path, text in tests.items() if path not in hidden}
    for field, group in (("tests", tests), ("hidden_tests", hidden)):
        try:
            found = named_tests(group, options.test_runner)
        except SyntaxError as error:
            raise ConfigError(
                f"{where}: `{field}`: {error.filename}:{error.lineno} is no Python ({error.msg})"
            ) from None
        if field == "hidden_tests" and not found:
            raise ConfigError(f"{where}: `hidden_tests` must name at least one test for {options.test_runner}")
    shown = files | tests
    request = "\n".join([statement.rstrip(), "", "Files:", *sorted(shown)])
    repair = RepairTask(shown, request, HiddenTests(visible, hidden, options.test_runner))
    data = {"repair": repair, "instance_id": name}
    return Task(f"own/{name}", str(row.get("difficulty", "")), data), weight


def _files(row: dict[str, Any], field: str, where: str) -> dict[str, str]:
    files = row.get(field, {})
    if not isinstance(files, dict):
        raise ConfigError(f"{where}: `{field}` must be an object of path → text: got {type(files).__name__}")
    for path, text in files.items():
        if not isinstance(text, str):
            raise ConfigError(f"{where}: `{field}`: {path} must be a text: got {type(text).__name__}")
        try:
            check_path(path)
        except Refused as error:
            raise ConfigError(f"{where}: `{field}`: {error}") from None
    return dict(files)
