"""Many coroutines ask one by one; one thread answers those that wait together, so that the event loop never does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Batched(Generic[Asked, Answer]):
    """``start()`` makes, at the first question and in the thread, the function that answers at most ``most`` at a time.

    While it answers some, the next gather. For one event loop at a time. What ``start`` or the function raises is
    raised to everyone who waits for it; after a failed start the next question tries again.
    """

    def __init__(self, start: Callable[[], Callable[[Sequence[Asked]], Sequence[Answer]]], most: int) -> None:
        self._start, self._most = start, most
        self._function: Callable[[Sequence[Asked]], Sequence[Answer]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batched")
        self._waiting: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._begun = False

    def begin(self) -> None:
        """Let ``start`` be called now, not at the first question; if it fails, the first question tells."""
        if self._function is None and not self._begun:
            self._begun = True
            self._thread.submit(self._ready)

    async def __call__(self, asked: Asked) -> Answer:
        """The answer to ``asked``."""
        loop = asyncio.get_running_loop()
        if self._runner is None or self._runner.done() or self._runner.get_loop() is not loop:
            self._waiting.clear()  # of a loop that ended before it was answered
            self._runner = loop.create_task(self._run(loop))
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((asked, answer))
        return await answer

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            batch = [(asked, answer) for asked, answer in batch if not answer.done()]
            if not batch:
                continue
            try:
                answers = await loop.run_in_executor(self._thread, self._answer, [asked for asked, _ in batch])
                answered = list(zip(batch, answers, strict=True))
            except Exception as error:  # raised to those who asked
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
            else:
                for (_, answer), value in answered:
                    if not answer.done():
                        answer.set_result(value)

    def _answer(self, asked: Sequence[Asked]) -> Sequence[Answer]:
        return self._ready()(asked)

    def _ready(self) -> Callable[[Sequence[Asked]], Sequence[Answer]]:
        if self._function is None:
            self._function = self._start()
        return self._function
