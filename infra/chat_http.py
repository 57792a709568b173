"""The HTTP face of the capturing endpoint: OpenAI's chat completions, each call for the rollout that its key names.

Only ever on this machine's loopback. It holds nothing and samples nothing; a call waits without blocking the others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infra import chat_replies
from infra.chat_requests import BadRequest, read_request
from sao_core.agent_programs import MODEL_NAME, CallRefused, ChatAnswerer, RolloutOver

log = logging.getLogger(__name__)

BODY_BYTES = 16 * 2**20
"""Longest request; a conversation that fits a context is far shorter."""

Find = Callable[[str], ChatAnswerer]
"""Key → its rollout; raises KeyError for a key that was never given out, RolloutOver for one that is done with."""

_NO_RETRY = {"x-should-retry": "false"}


def application(find: Find) -> Starlette:
    """The endpoint over the rollouts that ``find`` knows."""
    numbers = itertools.count(1)

    async def complete(request: Request) -> Response:
        rollout = _rollout(request)
        asked = read_request(await _body(request), rollout.sampling)
        completion = await rollout.complete(asked.messages, asked.tools, asked.max_tokens, again=_again(request))
        number, token_text = next(numbers), rollout.text_of if asked.logprobs else None
        if asked.stream:
            return StreamingResponse(
                chat_replies.chunks(number, completion, token_text, asked.usage_in_stream),
                media_type="text/event-stream",
            )
        return JSONResponse(chat_replies.reply(number, completion, token_text))

    async def models(request: Request) -> Response:
        _rollout(request)
        return JSONResponse(chat_replies.models())

    async def model(request: Request) -> Response:
        _rollout(request)
        name = request.path_params["name"]
        if name != MODEL_NAME:
            raise BadRequest(f"there is no model {name!r}, only {MODEL_NAME!r}", "model", "model_not_found", 404)
        return JSONResponse(chat_replies.model())

    def _rollout(request: Request) -> ChatAnswerer:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        try:
            return find(key.strip() if scheme.lower() == "bearer" else "")
        except KeyError:
            raise BadRequest(
                "no rollout has this API key: take OPENAI_API_KEY as the program got it", None, "invalid_api_key", 401
            ) from None

    return Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
        ],
        exception_handlers={
            BadRequest: _refused,
            CallRefused: _refused,
            RolloutOver: _over,
            HTTPException: _no_such_thing,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


def _again(request: Request) -> bool:
    """OpenAI's clients count the retries of a call whose answer they never read."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("0", "")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise BadRequest(f"the body must have at most {BODY_BYTES} bytes", None, "request_too_large", 413)
    return bytes(body)


async def _refused(request: Request, error: Any) -> Response:
    status, param = getattr(error, "status", 400), getattr(error, "param", None)
    return JSONResponse(chat_replies.error(str(error), code=error.code, param=param), status, _NO_RETRY)


async def _over(request: Request, error: Exception) -> Response:
    return JSONResponse(chat_replies.error(str(error), code="rollout_over"), 410, _NO_RETRY)


async def _no_such_thing(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path} is not served: chat completions are, at /v1/chat/completions"
    return JSONResponse(chat_replies.error(message, code="not_found"), error.status_code, _NO_RETRY)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    message = f"the policy cannot answer: {type(error).__name__}: {error}"
    return JSONResponse(chat_replies.error(message, code="server_error", kind="server_error"), 500, _NO_RETRY)
