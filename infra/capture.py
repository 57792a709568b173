"""Serves rollouts to programs on this machine: one HTTP server in a worker's event loop, one API key per rollout.

The server starts with the first rollout and stops with the loop; a worker without external agents never imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sao_core.agent_programs import Address, ChatAnswerer, RolloutOver

if TYPE_CHECKING:
    import uvicorn

_REMEMBERED = 1024
"""Keys of ended rollouts that are told so; older ones are unknown."""


class CaptureEndpoint:
    """The endpoint of one worker; see :class:`sao_core.agent_programs.ChatEndpoint`. One event loop owns it."""

    def __init__(self) -> None:
        self._rollouts: dict[str, ChatAnswerer] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._starting = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._base_url = ""

    @asynccontextmanager
    async def serving(self, rollout: ChatAnswerer) -> AsyncIterator[Address]:
        """Serve ``rollout`` within the context; later calls with its key are told that it is over."""
        async with self._starting:
            if self._server is None or self._server.done():
                await self._start()
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._rollouts[key] = rollout
        try:
            yield Address(self._base_url, key)
        finally:
            del self._rollouts[key]
            self._ended[key] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def _find(self, key: str) -> ChatAnswerer:
        if key in self._ended:
            raise RolloutOver("this rollout has ended")
        return self._rollouts[key]

    async def _start(self) -> None:
        import uvicorn

        from infra.chat_http import application

        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        config = uvicorn.Config(
            application(self._find),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=1,
        )
        server = _quiet_server(config)
        self._base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self._server = asyncio.create_task(_serve(server, listener), name="capturing endpoint")
        while not server.started:
            if self._server.done():
                self._server.result()
                raise RuntimeError("the capturing endpoint ended at its start")
            await asyncio.sleep(0.01)


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until the loop ends, which cancels this; nothing may keep it from ending."""
    try:
        await server.serve(sockets=[listener])
    finally:
        for accepting in getattr(server, "servers", ()):
            accepting.close()
        listener.close()


def _quiet_server(config: uvicorn.Config) -> uvicorn.Server:
    """A server that leaves signals alone: they are the worker's."""
    import uvicorn

    class QuietServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return QuietServer(config)
