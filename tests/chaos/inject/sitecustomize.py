"""Kills its own process at a named point; every Python process that has this folder on its PYTHONPATH runs it at start.

`CHAOS_PLAN` names a JSON file: a list of entries with `id`, `process` (a pattern on the process's name), `at`
(`module:Qualified.name` of a function), `when` (`before` or `after` that function), `nth` (of its calls in this
process) and `holding` (only calls with an argument that contains this text count). The function is wrapped once its
module is imported. An entry kills once: whoever creates `claimed-<id>` beside the plan fires it, and notes it in
`kills.jsonl`.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.abc
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

Entry = dict[str, Any]


def process_name() -> str:
    """`rollout-0`, `learner`, … for a child of a run, `flow` for `sao train`, otherwise empty."""
    arguments = sys.orig_argv
    for place, argument in enumerate(arguments):
        if argument.endswith("infra/child.py"):
            return arguments[place + 1]
        if argument == "flows.cli" and arguments[place + 1 : place + 2] == ["train"]:
            return "flow"
    return ""


def claim(plan: Path, entry: Entry) -> bool:
    """Whether this process is the first at the entry; the kill is noted before it happens."""
    try:
        os.close(os.open(plan.with_name(f"claimed-{entry['id']}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    note = {"id": entry["id"], "process": process_name(), "pid": os.getpid(), "at": time.time()}
    with open(plan.with_name("kills.jsonl"), "a") as notes:
        notes.write(json.dumps(note) + "\n")
    return True


def deadly(function: Callable[..., Any], plan: Path, entry: Entry) -> Callable[..., Any]:
    """``function``, at whose nth call the process dies."""
    calls, holding = itertools.count(1), entry["holding"]

    def due(arguments: Sequence[Any]) -> bool:
        counts = not holding or any(holding in str(argument) for argument in arguments)
        return counts and next(calls) == entry["nth"] and claim(plan, entry)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        die = due((*args, *kwargs.values()))
        if die and entry["when"] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


class Trap(importlib.abc.MetaPathFinder):
    """Wraps functions of the plan as their modules are imported, before anyone can take hold of them."""

    def __init__(self, plan: Path, entries: list[Entry]) -> None:
        self._plan = plan
        self._entries = entries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module that has functions to wrap, with a loader that does so; otherwise None."""
        mine = [entry for entry in self._entries if entry["at"].partition(":")[0] == name]
        if not mine:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            raise ImportError(f"the plan names {name}, which is not there")
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for entry in mine:
                *owners, function = entry["at"].partition(":")[2].split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, function, deadly(getattr(owner, function), self._plan, entry))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if plan_path := os.environ.get("CHAOS_PLAN"):
    entries = [e for e in json.loads(Path(plan_path).read_text()) if fnmatch.fnmatch(process_name(), e["process"])]
    if entries:
        sys.meta_path.insert(0, Trap(Path(plan_path), entries))
