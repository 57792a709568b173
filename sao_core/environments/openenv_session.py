"""A thin client of an OpenEnv server: one websocket connection, one session, ``reset`` and ``step`` messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from sao_core.environments.extras import require

_LARGEST_MESSAGE = 64 * 2**20
_RETRY_S = 0.2


class OpenEnvError(RuntimeError):
    """What the server answered instead of an observation."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the OpenEnv server answered {code}: {message}")
        self.code = code


class OpenEnvSession:
    """One episode at the server, over one connection."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: Any = None

    async def reset(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Connect and begin; waits while the server has no session free, for as long as the caller does."""
        connect = require("websockets.asyncio.client", "openenv", "openenv").connect
        while True:
            # No keep-alive: an environment that thinks for minutes is not gone, and the caller has its own limits.
            self._socket = await connect(self._address, max_size=_LARGEST_MESSAGE, ping_interval=None, proxy=None)
            try:
                return await self.ask("reset", parameters)
            except OpenEnvError as error:
                if error.code != "CAPACITY_REACHED":
                    raise
            await self.close()
            await asyncio.sleep(_RETRY_S)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send one message; the data of the answer. Raises :class:`OpenEnvError`."""
        closed = require("websockets.exceptions", "openenv", "openenv").ConnectionClosed
        with contextlib.suppress(closed):  # a server without a free session says so and hangs up, unasked
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        try:
            answer = json.loads(await self._socket.recv())
        except closed as error:
            raise OpenEnvError("CLOSED", f"the connection ended ({error})") from error
        content: dict[str, Any] = answer.get("data", {})
        if answer.get("type") == "error":
            details = content.get("errors")
            raise OpenEnvError(
                str(content.get("code")), f"{content.get('message')}{'' if not details else ' ' + _problems(details)}"
            )
        return content

    async def close(self) -> None:
        """Hang up, which ends the episode at the server."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()


def _problems(errors: list[dict[str, Any]]) -> str:
    return "; ".join(f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in errors)
