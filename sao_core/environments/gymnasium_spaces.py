"""Between gymnasium's spaces and text: how an observation reads, and which action a reply names.

Pure functions over spaces; nothing here steps an environment. NumPy arrays become JSON lists, numbers keep four digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MOST_NUMBERS = 256
"""Numbers of an observation that a prompt may spell out."""
_ACTION = re.compile(r"(?im)^[^\S\n]*action[^\S\n]*[:=](.*)$")
_ANSI_MARKED = re.compile(r"\x1b\[(?:\d+;)*4\d(?:;\d+)*m(.*?)\x1b\[0?m", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class MalformedAction(ValueError):
    """A reply that names no action; the message is written for the model to read."""


def without_ansi(text: str) -> str:
    """What a terminal would show, without its colours: ``[x]`` where the background of ``x`` is coloured."""
    return _ANSI.sub("", _ANSI_MARKED.sub(r"[\1]", text)).strip("\n")


def numbers_in(space: Any) -> int:
    """How many numbers an observation of ``space`` would spell out; 0 for texts."""
    kind = type(space).__name__
    if kind == "Dict":
        return sum(numbers_in(part) for part in space.spaces.values())
    if kind == "Tuple":
        return sum(numbers_in(part) for part in space.spaces)
    if kind == "Text":
        return 0
    return int(np.prod(space.shape)) if space.shape else 1


def observed(space: Any, value: Any) -> str:
    """An observation as text: texts and numbers as they are, a Dict as ``name: value`` lines, the rest as JSON."""
    if isinstance(value, str):
        return value
    if type(space).__name__ == "Dict" and isinstance(value, Mapping):
        return "\n".join(f"{name}: {observed(space.spaces[name], part)}" for name, part in value.items())
    return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    return str(value)


def actions_of(space: Any, names: Sequence[str]) -> str:
    """What a reply may say after ``action:``, for instructions and for replies that miss it."""
    kind = type(space).__name__
    if names:
        return f"one of {', '.join(names)}"
    if kind == "Discrete":
        return f"a number from {int(space.start)} to {int(space.start + space.n) - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    return f"a JSON value in {space}"


def action_of(reply: str, space: Any, names: Sequence[str]) -> Any:
    """The action in the last ``action: …`` line of a reply, or in the whole of it where there is no such line.

    Raises :class:`MalformedAction` if it names none that ``space`` contains.
    """
    lines = _ACTION.findall(reply)
    said = (lines[-1] if lines else reply).strip()
    action = _read(said, space, names)
    if action is None or not space.contains(action):
        raise MalformedAction(f"error: write `action: ` and {actions_of(space, names)}")
    return action


def said_as(action: Any, space: Any, names: Sequence[str]) -> str:
    """The line that :func:`action_of` reads as ``action``."""
    if type(space).__name__ == "Discrete":
        index = int(action)
        return f"action: {names[index - int(space.start)] if names else index}"
    return f"action: {action if isinstance(action, str) else json.dumps(_plain(action))}"


def _read(said: str, space: Any, names: Sequence[str]) -> Any:
    kind = type(space).__name__
    if kind == "Text":
        return said
    if kind == "Discrete":
        word = said.strip("`'\"*. ").casefold()
        folded = [name.casefold() for name in names]
        if word in folded:
            return np.int64(space.start + folded.index(word))
        return np.int64(word) if re.fullmatch(r"-?[0-9]{1,9}", word) else None
    try:
        return _shaped(json.loads(said), space)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _shaped(value: Any, space: Any) -> Any:
    kind = type(space).__name__
    if kind == "Dict":
        return {name: _shaped(value[name], part) for name, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_shaped(part, inner) for part, inner in zip(value, space.spaces, strict=True))
    if kind == "Text":
        return value
    if kind == "Discrete":
        return np.int64(value)
    given = np.asarray(value)
    if not np.can_cast(given.dtype, space.dtype, casting="same_kind") and given.dtype.kind not in "biu":
        raise ValueError(f"{given.dtype} cannot stand for {space.dtype}")
    return given.astype(space.dtype)
