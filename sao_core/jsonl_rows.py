"""Reading a user's JSON Lines: one object per line, and conversations in it; every error names file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sao_core.config import ConfigError
from sao_core.tool_calls import MalformedToolCall, calls_of
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
    """The ``messages`` of a row: objects with ``role`` and ``content``, in OpenAI's shape also ``tool_calls``,
    ``tool_call_id`` and ``name``. The row's ``tools`` go with the first message. Raises ConfigError.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: `messages` must be a list of at least one message: got {messages!r:.60}")
    first, *rest = (_message(message, f"{where}: message {number}") for number, message in enumerate(messages, start=1))
    if tools := row.get("tools"):
        if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
            raise ConfigError(f"{where}: `tools` must be a list of function schemas with a `name`: got {tools!r:.60}")
        first = replace(first, extra={**first.extra, "tools": tools})
    return first, *rest


def weight_of(row: Mapping[str, Any], where: str) -> float:
    """The ``weight`` of a row, 1 where it has none; raises ConfigError."""
    weight = row.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"{where}: `weight` must be a number over 0: got {weight!r:.60}")
    return float(weight)


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(value: Any, where: str) -> Message:
    calls = value.get("tool_calls") if isinstance(value, dict) else None
    content = value.get("content") if isinstance(value, dict) else None
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ConfigError(f"{where} must be an object with a text `content`: got {value!r:.60}")
    role = value.get("role")
    if role not in list(Role):
        raise ConfigError(f"{where}: `role` must be one of {', '.join(Role)}: got {role!r:.60}")
    if calls:
        try:
            calls_of(calls)
        except MalformedToolCall as error:
            raise ConfigError(f"{where}: `tool_calls`: {error}") from None
    extra = {name: value[name] for name in ("tool_calls", "tool_call_id", "name") if value.get(name)}
    return Message(Role(role), content, extra)
