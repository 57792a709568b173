"""Tool calls in what a policy wrote: read in the formats of the common model families, and written in the plainest.

Hermes and Qwen JSON, Qwen-coder XML, Llama-3 JSON, Mistral, Phi and DeepSeek. Reading never repairs: a call that a
strict reader would refuse is :class:`MalformedToolCall`, since a policy learns what its reader lets pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""Functions in the JSON schema of OpenAI's ``tools``."""

THINKING_STARTS, THINKING_ENDS = "<think>", "</think>"


class MalformedToolCall(ValueError):
    """What was meant as a tool call cannot be read; the message is written for the model to read."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a function by its name."""

    name: str
    arguments: Mapping[str, Any] = field(hash=False)
    call_id: str = field(default="", compare=False)
    """What the model called the call, where its format has room for that."""


def without_thinking(text: str) -> str:
    """What follows a turn's thinking; empty if the thinking never ended."""
    return text[_after_thinking(text) :]


def parse_tool_calls(text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """The text outside the calls, and the calls in order; a text without calls comes back as it is.

    Calls within a turn's thinking are only thought of, and stay text. ``tools`` tells the types of parameters, which
    Qwen-coder XML does not write down; without it they are read as JSON where they are JSON. Raises
    :class:`MalformedToolCall` if any of the calls cannot be read.
    """
    position = _after_thinking(text)
    outside, calls = [text[:position]], list[ToolCall]()
    if bare := _read_bare(text, position):
        found, position = bare
        calls += found
    while opening := _OPENING.search(text, position):
        outside.append(text[position : opening.start()])
        found, position = _READERS[opening.group()](text, opening.end(), tools)
        calls += found
    outside.append(text[position:])
    return ("".join(outside).strip() if calls else text), tuple(calls)


def write_tool_calls(calls: Sequence[ToolCall], text: str = "") -> str:
    """``text`` and the calls in Hermes format, for models whose template has none of its own."""
    written = (
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n</tool_call>"
        for call in calls
    )
    return "\n".join([*([text] if text else []), *written])


def calls_of(value: Any) -> list[ToolCall]:
    """One call, or a list of them, as objects with ``name`` and ``arguments`` (or ``parameters``), or as OpenAI's
    ``tool_calls``. Raises :class:`MalformedToolCall`.
    """
    calls = []
    for item in value if isinstance(value, list) else [value]:
        inner = item.get("function", item) if isinstance(item, Mapping) else item
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise MalformedToolCall('a tool call must be {"name": FUNCTION, "arguments": {…}}')
        call_id = item.get("id")
        arguments = inner.get("arguments", inner.get("parameters"))
        calls.append(_call(inner["name"], arguments, call_id if isinstance(call_id, str) else ""))
    return calls


_Read = tuple[list[ToolCall], int]
"""The calls found, and where the text after them starts."""


def _after_thinking(text: str) -> int:
    """Where the thinking ends: at its closing tag, opened by the policy or by the generation prompt before it."""
    end = text.find(THINKING_ENDS)
    if text.lstrip().startswith(THINKING_STARTS):
        return len(text) if end < 0 else end + len(THINKING_ENDS)
    if end < 0:
        return 0
    opening = _OPENING.search(text, 0, end)
    if _BARE.match(text):
        return 0
    if opening:
        try:
            _, stop = _READERS[opening.group()](text, opening.end(), ())
        except MalformedToolCall:
            stop = 0
        if stop > end:
            return 0  # the tag is part of an argument
    return end + len(THINKING_ENDS)


def _read_tagged(text: str, start: int, tools: Tools) -> _Read:
    if re.compile(r"\s*<function=").match(text, start):
        return _read_xml(text, start, tools)
    value, end = _json(text, start)
    return calls_of(value), _close(text, end, "</tool_call>")


def _read_phi(text: str, start: int, tools: Tools) -> _Read:
    value, end = _json(text, start)
    return calls_of(value), _close(text, end, "<|/tool_call|>")


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*(?:</tool_call>|$)", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL
)  # a closing tag within a value ends it only if a parameter, or nothing, follows


def _read_xml(text: str, start: int, tools: Tools) -> _Read:
    function = _FUNCTION.match(text, start)
    if function is None:
        raise MalformedToolCall("the tool call must end with </function> and </tool_call>")
    name, body = function.groups()
    types = _parameter_types(name, tools)
    arguments, position = dict[str, Any](), 0
    body = body.rstrip()
    while position < len(body):
        parameter = _PARAMETER.match(body, position)
        if parameter is None:
            raise MalformedToolCall("between <function=…> and </function> only <parameter=NAME>…</parameter> may stand")
        key, value = parameter.groups()
        arguments[key] = _typed(value, types.get(key))
        position = parameter.end()
    return [_checked(ToolCall(name, arguments))], function.end()


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral(text: str, start: int, tools: Tools) -> _Read:
    named = _MISTRAL_NAME.match(text, start)
    value, end = _json(text, named.end() if named else start)
    if named:
        return [_call(named.group(1), value, named.group(2) or "")], end
    return calls_of(value), end


def _read_python_tag(text: str, start: int, tools: Tools) -> _Read:
    value, end = _json(text, start)
    return _more_after_semicolon(text, calls_of(value), end)


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\n```json\n)"
)


def _read_deepseek(text: str, start: int, tools: Tools) -> _Read:
    calls, position = list[ToolCall](), start
    while begun := _DEEPSEEK_CALL.match(text, position):
        value, position = _json(text, begun.end())
        fence = re.compile(r"\s*```").match(text, position)
        position = _close(text, fence.end() if fence else position, "<｜tool▁call▁end｜>")
        calls.append(_call(begun.group(1), value))
    if not calls:
        raise MalformedToolCall("after <｜tool▁calls▁begin｜> a call must begin with <｜tool▁call▁begin｜>")
    return calls, _close(text, position, "<｜tool▁calls▁end｜>")


_READERS: dict[str, Callable[[str, int, Tools], _Read]] = {
    "<tool_call>": _read_tagged,
    "[TOOL_CALLS]": _read_mistral,
    "<|python_tag|>": _read_python_tag,
    "<|tool_call|>": _read_phi,
    "<｜tool▁calls▁begin｜>": _read_deepseek,
}
_OPENING = re.compile("|".join(map(re.escape, _READERS)))
_BARE = re.compile(r"\s*(?=\{\s*\"name\"\s*:)")


def _read_bare(text: str, start: int) -> _Read | None:
    """Llama's calls, which are a whole turn of JSON without any mark; None where the JSON is something else."""
    opening = _BARE.match(text, start)
    if opening is None:
        return None
    try:
        value, end = _json(text, opening.end())
    except MalformedToolCall:
        if re.compile(r'"(?:parameters|arguments)"\s*:').search(text, start):
            raise
        return None
    if not {"parameters", "arguments"} & value.keys():
        return None
    return _more_after_semicolon(text, calls_of(value), end)


def _more_after_semicolon(text: str, calls: list[ToolCall], end: int) -> _Read:
    while separator := re.compile(r"\s*;\s*(?=\{)").match(text, end):
        value, end = _json(text, separator.end())
        calls += calls_of(value)
    return calls, end


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"\s*")


def _json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that starts at ``start``, and where it ends: a closing mark within a string ends nothing."""
    match = _SPACE.match(text, start)
    begin = match.end() if match else start
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise MalformedToolCall(
            f"the tool call is not valid JSON: {error.msg} at character {error.pos - begin + 1}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise MalformedToolCall(f"the tool call is not valid JSON: {error}") from None


def _typed(value: str, kind: Any) -> Any:
    """A parameter that was written without quotes; booleans are written as Python writes them."""
    if kind == "string":
        return value
    if kind == "boolean" and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    try:
        return _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


def _close(text: str, end: int, mark: str) -> int:
    """Where the text after ``mark`` starts; the end of the turn closes a call as well."""
    match = _SPACE.match(text, end)
    position = match.end() if match else end
    if text.startswith(mark, position):
        return position + len(mark)
    if position == len(text):
        return position
    raise MalformedToolCall(f"the tool call must end with {mark}: got `{text[position : position + 20]}`")


def _call(name: str, arguments: Any, call_id: str = "") -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            arguments = arguments or None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedToolCall(f"the arguments of `{name}` must be a JSON object: got {type(arguments).__name__}")
    return _checked(ToolCall(name, arguments, call_id))


def _checked(call: ToolCall) -> ToolCall:
    """JSON can name half of a surrogate pair, which is no text that anything could store or read."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedToolCall(r"the tool call holds half a surrogate pair (\ud800 … \udfff)") from None
    return call


def _parameter_types(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}
