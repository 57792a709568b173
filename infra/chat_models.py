"""Chat models over HTTP, as OpenAI's chat completions: how an environment asks a judge.

It alone knows the keys: they go into the header of a request and nowhere else, neither into a record nor into an
error. A busy or unreachable endpoint is asked again a few times; what it refuses is raised with what it said.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from infra.settings import ChatKeys
from sao_core.trajectory import Message

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""Times that an endpoint is asked before its answer counts as failed."""
FIRST_PAUSE_S = 0.5
"""Pause before the second attempt; it doubles each time, with up to as much again at random."""
LONGEST_PAUSE_S = 8.0
"""Longest pause, also where an endpoint asks for a longer one."""
_SHOWN_CHARACTERS = 300
_BUSY = frozenset({408, 429})


class ChatFailed(RuntimeError):
    """An endpoint that could not be reached, or what it answered instead of a reply."""


class HttpChatModels:
    """Opens chat models by address; their connections are shared and last as long as the event loop that uses them."""

    def __init__(self, keys: ChatKeys) -> None:
        self._keys = keys
        self._models: dict[tuple[str, str, float], HttpChatModel] = {}
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request otherwise

    def at(self, base_url: str, model: str, *, timeout_s: float = 60.0) -> HttpChatModel:
        """The model called ``model`` at ``base_url``; raises :class:`ChatFailed` for an address that is none."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatFailed(f"a chat model's address must look like https://host/v1: got {base_url!r}")
        if "@" in parts.netloc:
            raise ChatFailed(
                f"a chat model's address must carry no password: got one for {parts.hostname}; set SAO_CHAT_API_KEY"
            )
        place = base_url.rstrip("/"), model, timeout_s
        if place not in self._models:
            self._models[place] = HttpChatModel(self, *place, self._keys.key_for(base_url))
        return self._models[place]

    @property
    def client(self) -> httpx.AsyncClient:
        """The connections of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = httpx.AsyncClient(timeout=None), loop
        return self._client


class HttpChatModel:
    """One model at one address."""

    def __init__(
        self, connections: HttpChatModels, base_url: str, model: str, timeout_s: float, key: str | None
    ) -> None:
        self._connections = connections
        self._url = f"{base_url}/chat/completions"
        self._model, self._key, self._timeout_s = model, key, timeout_s
        self._length_name = "max_tokens"
        self._takes_temperature = True

    async def complete(self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 0.0) -> str:
        """The text of the reply; raises :class:`ChatFailed` that names the endpoint and what went wrong.

        ``timeout_s`` holds for each of at most :data:`ATTEMPTS` attempts.
        """
        said = [message.as_dict() for message in messages]
        trouble, pause = "", FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            body: dict[str, Any] = {"model": self._model, "messages": said, self._length_name: max_tokens}
            if self._takes_temperature:
                body["temperature"] = temperature
            asked_pause = 0.0
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._connections.client.post(self._url, json=body, headers=self._headers())
            except TimeoutError:
                trouble = f"gave no answer within {self._timeout_s:g} s"
            except httpx.TransportError as error:
                trouble = f"could not be reached ({type(error).__name__}: {self._without_key(str(error))})"
            else:
                if response.is_success:
                    return self._text(response)
                trouble = f"answered {response.status_code}: {self._shown(response.text)}"
                if response.status_code == 400 and self._adapt(response):
                    continue
                if response.status_code < 500 and response.status_code not in _BUSY:
                    raise ChatFailed(f"{self._url} {trouble}")
                asked_pause = _seconds(response.headers.get("retry-after"))
            if attempt < ATTEMPTS:
                logger.info("%s %s; asking again", self._url, trouble)
                await asyncio.sleep(min(max(pause * (1 + random.random()), asked_pause), LONGEST_PAUSE_S))
                pause *= 2
        raise ChatFailed(f"{self._url} {trouble} (asked {ATTEMPTS} times)")

    def _headers(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    def _text(self, response: httpx.Response) -> str:
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise ChatFailed(f"{self._url} answered no chat completion: {self._shown(response.text)}") from None
        if not isinstance(text, str):
            raise ChatFailed(f"{self._url} answered a chat completion without text: {self._shown(response.text)}")
        return text

    def _adapt(self, response: httpx.Response) -> bool:
        """Whether the endpoint refused a parameter that this model names otherwise or does not have."""
        refused = _refused_parameter(response)
        if refused == "max_tokens" and self._length_name == "max_tokens":
            self._length_name = "max_completion_tokens"
            return True
        if refused == "temperature" and self._takes_temperature:
            self._takes_temperature = False
            return True
        return False

    def _shown(self, text: str) -> str:
        return " ".join(self._without_key(text).split())[:_SHOWN_CHARACTERS] or "nothing"

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "(the key)")


def _refused_parameter(response: httpx.Response) -> str | None:
    try:
        error = response.json()["error"]
    except (ValueError, LookupError, TypeError):
        return None
    unsupported = isinstance(error, Mapping) and error.get("code") in ("unsupported_parameter", "unsupported_value")
    return str(error.get("param")) if unsupported else None


def _seconds(value: str | None) -> float:
    """Seconds of a `Retry-After`; 0 where there is none, or a date."""
    return float(value) if value is not None and value.isdecimal() else 0.0
