"""Calls a candidate's functions and writes down what comes back, as JSON that only plain data gets into.

Reads one line: {"calls": [[module, function, arguments], …]}. Answers one line per call, as soon as it is done:
[index, {"value": …}] or [index, {"raised": [names of Python's own classes]}]. It judges nothing, and knows nothing
that is right.
"""

import importlib
import json
import os
import sys
from typing import Any

PLAIN = (type(None), bool, int, float, str)


class NotPlain(ValueError):
    """A value that is no plain data."""


def encode(value: Any) -> Any:
    """A value as JSON that keeps lists, tuples, sets and dictionaries apart. Raises :class:`NotPlain`.

    Types are taken as they are: a subclass of str or int could pretend to equal anything. Of dictionaries the
    subclasses count too, as their items are read past any method of theirs.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple):
        return {kind.__name__: [encode(item) for item in value]}
    if kind in (set, frozenset):
        return {"set": sorted((encode(item) for item in value), key=json.dumps)}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    raise NotPlain(f"a {kind.__name__} is no plain data")


def decode(value: Any) -> Any:
    """What :func:`encode` was given. Raises ValueError or TypeError for anything else."""
    if type(value) in PLAIN:
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    made: dict[str, type] = {"list": list, "tuple": tuple, "set": set}
    if kind not in made:
        raise ValueError(f"no such kind of data: {kind}")
    return made[kind](decode(item) for item in items)


def outcome(module: str, name: str, encoded: Any) -> dict[str, Any]:
    """Make one call; whatever goes wrong is its outcome."""
    arguments = decode(encoded)
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:  # a module may raise anything, SystemExit too
        return {"missing": type(error).__name__}
    try:
        came: dict[str, Any] = {"value": encode(function(*arguments))}
    except (NotPlain, RecursionError) as error:
        came = {"raised": [type(error).__name__]}
    except BaseException as error:
        came = {"raised": [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]}
    try:
        return {**came, "changed": encode(arguments) != encoded}
    except (NotPlain, RecursionError):
        return {**came, "changed": True}


def answer(index: int, module: str, name: str, encoded: Any) -> str:
    """The line that answers a call."""
    try:
        return json.dumps([index, outcome(module, name, encoded)]) + "\n"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, for one
        return json.dumps([index, {"missing": type(error).__name__}]) + "\n"


def path_of_modules() -> None:
    """Look for modules in the candidate's folder after the standard library, and before installed packages."""
    places = [place for place, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))]
    sys.path.insert(min(places, default=len(sys.path)), os.getcwd())


def main() -> None:
    """Serve the calls on standard input; the candidate gets none of the standard streams."""
    calls = json.loads(sys.stdin.readline())["calls"]
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    path_of_modules()
    for index, call in enumerate(calls):
        os.write(answers, answer(index, *call).encode())
    os._exit(0)  # a thread or an exit handler of the candidate must not go on


if __name__ == "__main__":
    main()
