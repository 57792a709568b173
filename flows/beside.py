"""Shows a run to people from a thread of its own, beside what makes the run; what it shows is read from the ledger."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from rich.console import Console

from infra.ledger import Ledger

REFRESH_S = 0.5
LAST_WORDS_S = 5.0
"""Longest that the end of a run waits for what is shown."""


class Beside(ABC):
    """While the context lasts, :meth:`_show` runs; it looks at ``self._done`` every :data:`REFRESH_S`."""

    def __init__(self, ledger: Ledger, run_id: str, console: Console) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._console = console
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(LAST_WORDS_S)

    @abstractmethod
    def _show(self) -> None:
        """Show what is new until the run is over."""
