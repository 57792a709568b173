"""Requests for chat completions, as OpenAI's clients write them: read and checked. No HTTP, no sampling.

Whatever would make the policy say something else than a sample of its own is refused, and the message says why:
the recorded log-probabilities would be those of another distribution.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sao_core.agent_programs import MODEL_NAME, as_tool_calls
from sao_core.tool_calls import MalformedToolCall, Tools, calls_of
from sao_core.trajectory import Message, Role, Sampling


class BadRequest(Exception):
    """A request that is refused; ``param`` names what is wrong in it."""

    def __init__(self, message: str, param: str | None = None, code: str = "unsupported_value", status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class ChatRequest:
    """What a client asks for."""

    messages: tuple[Message, ...]
    tools: Tools
    max_tokens: int | None
    stream: bool
    usage_in_stream: bool
    logprobs: bool


_SAMPLES = "replies are plain samples of the policy that trains"
_NEUTRAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "top_p": (lambda v: v == 1, f"must be 1: {_SAMPLES}"),
    "n": (lambda v: v == 1, "must be 1: ask again for another reply"),
    "frequency_penalty": (lambda v: v == 0, f"must be 0: {_SAMPLES}"),
    "presence_penalty": (lambda v: v == 0, f"must be 0: {_SAMPLES}"),
    "logit_bias": (lambda v: v == {}, f"must be empty: {_SAMPLES}"),
    "stop": (lambda v: v == [], "must be empty: the policy ends its turns itself; cut the text that you get"),
    "response_format": (lambda v: v == {"type": "text"}, f"must be text: {_SAMPLES}, and no grammar guides them"),
    "top_logprobs": (lambda v: v == 0, "must be 0: only the log-probabilities of sampled tokens are recorded"),
    "parallel_tool_calls": (lambda v: v is True, f"must be true: {_SAMPLES}, whose calls nobody counts"),
    "tool_choice": (lambda v: v in ("auto", "none"), f"must be auto or none: {_SAMPLES}, which call tools or do not"),
    "modalities": (lambda v: v == ["text"], "must be text"),
}
"""Parameter → whether a value leaves the samples alone, and why others are refused."""
_IGNORED = {"user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prompt_cache_key"}
"""They promise nothing about the reply; the seed is the run's own."""
_READ = {
    "model",
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "logprobs",
    "temperature",
}
_MESSAGE_FIELDS = ("name", "tool_call_id")


def read_request(body: bytes, sampling: Sampling) -> ChatRequest:
    """Check a request against how its rollout samples; raises :class:`BadRequest`."""
    try:
        given = json.loads(body)
        if b"\\u" in body:  # half of a surrogate pair may be escaped, and is no text
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body must be JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise BadRequest(f"the body must be an object: got {type(given).__name__}", code="invalid_type")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in _NEUTRAL:
            neutral, rule = _NEUTRAL[name]
            if not neutral(value):
                raise BadRequest(f"{name} {rule}: got {value!r:.80}", name)
        elif name not in _READ and name not in _IGNORED:
            raise BadRequest(f"{name} is not supported: leave it out", name, "unsupported_parameter")
    if given.get("model", MODEL_NAME) != MODEL_NAME:
        raise BadRequest(
            f"there is no model {given['model']!r:.80}: the policy is called {MODEL_NAME!r}, as OPENAI_MODEL says",
            "model",
            "model_not_found",
            404,
        )
    _check_temperature(given.get("temperature"), sampling)
    tools = given.get("tools", []) if given.get("tool_choice", "auto") == "auto" else []
    stream_options = given.get("stream_options", {})
    return ChatRequest(
        messages=_messages(given.get("messages")),
        tools=_tools(tools),
        max_tokens=_max_tokens(given),
        stream=bool(given.get("stream", False)),
        usage_in_stream=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        logprobs=bool(given.get("logprobs", False)),
    )


def _check_temperature(value: Any, sampling: Sampling) -> None:
    allowed = [sampling.temperature, *([0.0] if sampling.greedy else [])]
    if value is not None and value not in allowed:
        raise BadRequest(
            f"temperature must be {sampling.temperature:g}, as this run samples, or be left out: got {value!r:.80}",
            "temperature",
        )


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = given.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name} must be a whole number over 0: got {value!r:.80}", name, "invalid_value")
            return value
    return None


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list):
        raise BadRequest("tools must be a list", "tools", "invalid_type")
    for number, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"tools[{number}] must be a function with a name: got {tool!r:.80}", "tools", "invalid_value"
            )
    return tuple(given)


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list of at least one message", "messages", "invalid_type")
    return tuple(_message(value, f"messages[{number}]") for number, value in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise BadRequest(f"{where} must be an object: got {given!r:.80}", "messages", "invalid_type")
    name = "system" if given.get("role") == "developer" else given.get("role")
    if name not in list(Role):
        raise BadRequest(
            f"{where}: role must be one of {', '.join(Role)}: got {name!r:.80}", "messages", "invalid_value"
        )
    extra: dict[str, Any] = {key: given[key] for key in _MESSAGE_FIELDS if isinstance(given.get(key), str)}
    calls = given.get("tool_calls")
    if calls and name == Role.ASSISTANT:
        try:
            extra["tool_calls"] = as_tool_calls(calls_of(calls))
        except MalformedToolCall as error:
            raise BadRequest(f"{where}: tool_calls: {error}", "messages", "invalid_value") from None
    return Message(Role(name), _content(given.get("content"), where), extra)


def _content(given: Any, where: str) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in given
    ):
        return "".join(part["text"] for part in given)
    raise BadRequest(f"{where}: content must be text: got {given!r:.80}", "messages", "invalid_value")
