"""A process beside this one that answers requests: started by the first, replaced if it dies, gone with its owner.

For what cannot run here: another hash seed, or packages of another virtual environment. It reads pickles of
``(number, request)`` from its standard input and writes ``(number, answer, error text or None)``, in any order.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any


class SideProcessFailed(RuntimeError):
    """The process raised, or ended; the message says what it said."""


class SideProcess:
    """Asks the process that ``argv`` starts. Any thread may."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = tuple(argv)
        self._life: _Life | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, if it was started."""
        return None if self._life is None else self._life.process.pid

    def ask(self, request: Any) -> Future[Any]:
        """Send ``request``; the future holds the answer, or :class:`SideProcessFailed`."""
        with self._lock:
            if self._life is None or self._life.ended():
                if self._end is not None:
                    self._end.detach()
                self._life = _Life(self._argv)
                self._end = weakref.finalize(self, self._life.end)
            return self._life.send(request)


class _Life:
    """From the start of the process to its end, and what it owes."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the terminal is the parent's
        )
        self.over = False
        self._asked = 0
        self._owed: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name=f"replies of {self.process.pid}", daemon=True).start()

    def ended(self) -> bool:
        """Whether it takes no more requests."""
        # In this order, since a poll sees nothing while the reader, which sets `over` first, reaps the process.
        return self.process.poll() is not None or self.over

    def send(self, request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._asked += 1
            number = self._asked
            self._owed[number] = future
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it ended: whoever notices tells those who wait
            pickle.dump((number, request), self.process.stdin, protocol=4)
            self.process.stdin.flush()
        if self.over:
            self.end()
        return future

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
                while True:
                    number, answer, error = pickle.load(self.process.stdout)
                    with self._lock:
                        future = self._owed.pop(number)
                    if error is None:
                        future.set_result(answer)
                    else:
                        future.set_exception(SideProcessFailed(error))
        finally:  # also after an answer of classes that this process does not have
            self.end()

    def end(self) -> None:
        """Kill it, and tell those who wait."""
        self.over = True
        self.process.kill()
        code = self.process.wait()
        with self._lock:
            owed, self._owed = self._owed, {}
        for future in owed.values():
            future.set_exception(SideProcessFailed(f"its process ended with exit code {code}"))
