"""Replies to chat completions, as OpenAI's clients read them: whole, in chunks, or an error. No HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from sao_core.agent_programs import MODEL_NAME, Completion

TokenText = Callable[[int], str]


def reply(number: int, completion: Completion, token_text: TokenText | None) -> dict[str, Any]:
    """The whole reply; ``token_text`` is given where log-probabilities are wanted."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(completion), "refusal": None}
    if completion.tool_calls:
        message["tool_calls"] = _tool_calls(completion)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": completion.finish_reason,
        "logprobs": _logprobs(completion, token_text),
    }
    return {**_head(number, completion, "chat.completion"), "choices": [choice], "usage": _usage(completion)}


def chunks(number: int, completion: Completion, token_text: TokenText | None, with_usage: bool) -> Iterator[str]:
    """The reply as server-sent events: what was said, why it ended, and the usage if it is wanted."""
    head = _head(number, completion, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": _content(completion)}
    if completion.tool_calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(_tool_calls(completion))]
    said = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": _logprobs(completion, token_text)}
    ended = {"index": 0, "delta": {}, "finish_reason": completion.finish_reason, "logprobs": None}
    events = [{**head, "choices": [said]}, {**head, "choices": [ended]}]
    if with_usage:
        events.append({**head, "choices": [], "usage": _usage(completion)})
    for event in events:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def error(message: str, *, code: str | None, param: str | None = None, kind: str = "invalid_request_error") -> Any:
    """An error as clients show it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def models() -> dict[str, Any]:
    """The one model there is."""
    return {"object": "list", "data": [model()]}


def model() -> dict[str, Any]:
    """What is known of the policy."""
    return {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "sao"}


def _head(number: int, completion: Completion, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL_NAME,
        "system_fingerprint": f"version-{completion.version}",
    }


def _content(completion: Completion) -> str | None:
    return completion.text or (None if completion.tool_calls else "")


def _tool_calls(completion: Completion) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in completion.tool_calls
    ]


def _usage(completion: Completion) -> dict[str, int]:
    sampled = len(completion.token_ids)
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": completion.prompt_tokens + sampled,
    }


def _logprobs(completion: Completion, token_text: TokenText | None) -> dict[str, Any] | None:
    if token_text is None:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(map(token_text, completion.token_ids), completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
