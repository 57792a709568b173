"""Shows a run to people from a thread of its own, beside what makes the run; what it shows is read from the ledger."""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod

from infra.ledger import Ledger

REFRESH_S = 0.5
"""How often a terminal is looked after."""
LAST_WORDS_S = 5.0
"""Longest that the end of a run waits for what is shown."""


class Beside(ABC):
    """While the context lasts, :meth:`_show` runs and looks at ``self._done`` again and again.

    It runs as part of the flow run, if any, of whoever made this: what it makes in Prefect belongs to that.
    """

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._done = threading.Event()
        target = contextvars.copy_context().run
        self._thread = threading.Thread(target=target, args=(self._show,), name=type(self).__name__, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(LAST_WORDS_S)

    @abstractmethod
    def _show(self) -> None:
        """Show what is new until the run is over."""
