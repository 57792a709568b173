"""The ledger's queue as one worker sees it: what it leased, what it still holds, that it lives."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable

from infra.ledger import Ledger
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Purpose


def new_worker_id(name: str) -> str:
    """A name for one process, as `rollout-0-3f9a1c`: a restarted worker must not take over its predecessor's leases."""
    return f"{name}-{secrets.token_hex(3)}"


class LedgerRequests:
    """The `RequestSource` of one worker process."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        worker: str,
        purposes: Iterable[Purpose],
        lease_s: float,
        *,
        attempt: int | None = None,
        window: int | None = None,
        poll_s: float = 0.05,
    ) -> None:
        """Serve ``purposes`` as ``worker`` (see :func:`new_worker_id`) for one ``attempt`` of the run.

        ``window``: how many rollouts for training may be outstanding, see `Ledger.lease`.

        After an empty answer the ledger is left alone for ``poll_s``, so that an idle worker does not load it.
        """
        self._ledger = ledger
        self._run_id = run_id
        self._worker = worker
        self._purposes = tuple(purposes)
        self._lease_s = lease_s
        self._attempt = attempt
        self._window = window
        self._poll_s = poll_s
        self._ask_again_at = 0.0
        self._version: int | None = None
        self._holding: set[int] = set()
        self._lock = threading.Lock()

    def lease(self, limit: int) -> list[RolloutRequest]:
        """At most ``limit`` requests, leased to this worker; empty if there is nothing to do.

        Raises:
            Fenced: the run was resumed and has other workers now.
        """
        if limit < 1 or time.monotonic() < self._ask_again_at:
            return []
        requests = self._ledger.lease(
            self._run_id,
            self._worker,
            self._purposes,
            limit,
            self._lease_s,
            window=self._window,
            attempt=self._attempt,
        )
        if not requests:
            self._ask_again_at = time.monotonic() + self._poll_s
        with self._lock:
            self._holding.update(request.number for request in requests)
        return requests

    def fail(self, request: RolloutRequest, reason: str) -> None:
        """Give up this attempt; it is reissued up to ``max_attempts``, then exhausted."""
        self._ledger.fail_attempt(self._run_id, self._worker, request.number, request.attempt, reason)
        with self._lock:
            self._holding.discard(request.number)

    def heartbeat(self, state: str, version: int | None) -> None:
        """Say that the worker lives, and renew its leases."""
        self._version = version
        self._beat(state, version, None)

    def report_failure(self, error: str) -> None:
        """Say that the worker ends with ``error`` (its traceback); its requests go back, each an attempt poorer."""
        self._beat("failed", self._version, error)
        self._ledger.expire(self._run_id, self._worker)

    def release(self) -> int:
        """Give all leases back without spending attempts, at a clean stop; how many there were."""
        released = self._ledger.release(self._run_id, self._worker)
        self._beat("stopped", self._version, None)
        return released

    def _beat(self, state: str, version: int | None, error: str | None) -> None:
        with self._lock:
            holding = frozenset(self._holding)
        held = self._ledger.heartbeat(
            self._run_id,
            self._worker,
            state,
            version,
            socket.gethostname(),
            os.getpid(),
            self._lease_s,
            error,
            purposes=self._purposes,
            holding=holding,
        )
        with self._lock:
            self._holding -= holding.difference(held)
