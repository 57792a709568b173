"""A thread that runs one call after the other: for what must be made, used and closed in the same one."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a ``function`` that may take its time, or for ever, in a thread of its own."""
    thread = OneThread("one call")
    try:
        return await thread.run(function, *args)
    finally:
        thread.stop()


class OneThread:
    """Runs calls in their order; no exit of the process waits for it."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` there, after all calls before; a call that is no longer waited for is still finished."""
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # handed to the one who waits
                    future.set_exception(error)

        self._calls.put(call)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End after the calls that were made."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
