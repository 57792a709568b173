"""Reading a user's JSON Lines: one object per line, and conversations in it; every error names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sao_core.config import ConfigError
from sao_core.trajectory import Message, Role


def read_rows(path: Path, setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of ``file:line`` and the object on that line; blank lines are skipped.

    ``setting`` is the one that named the file. Raises ConfigError if the file cannot be read or a line is no object.
    """
    try:
        with path.expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield where, _object(line, where)
    except OSError as error:
        raise ConfigError(f"{setting} cannot be read: {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} must be UTF-8 text: {path}") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object: got {type(row).__name__}")
    return row


def messages_of(row: dict[str, Any], where: str) -> tuple[Message, ...]:
    """The ``messages`` of a row: a list of objects with ``role`` and ``content``. Raises ConfigError."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: `messages` must be a list of at least one message: got {messages!r:.60}")
    return tuple(_message(message, f"{where}: message {number}") for number, message in enumerate(messages, start=1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ConfigError(f"{where} must be an object with a text `content`: got {value!r:.60}")
    role = value.get("role")
    if role not in list(Role):
        raise ConfigError(f"{where}: `role` must be one of {', '.join(Role)}: got {role!r:.60}")
    return Message(Role(role), value["content"])
