"""MLflow: the one writer. The ledger is the queue; a thread sends what lies beyond its watermark.

    learner ── commit ──▶ ledger ── updates_since(watermark) ──▶ thread ── log_batch ──▶ MLflow
    flow ───── poke ─────────────────────────────────────────────▲

Never fatal, never blocking: the flow only sets an event. Whatever is sent may be sent twice: points carry the ledger's
times, runs, models and traces are found again by what they are of. What could not be sent by the end is sent by the
run's next start, or by `sync`.
"""

from __future__ import annotations

from infra.tracking.client import RUN_TAG, TrackingError, open_client
from infra.tracking.description import flatten, spans
from infra.tracking.sender import TrackedLedger
from infra.tracking.tracker import CLOSE_DEADLINE_S, Tracker, send_now

__all__ = [
    "CLOSE_DEADLINE_S",
    "RUN_TAG",
    "TrackedLedger",
    "Tracker",
    "TrackingError",
    "flatten",
    "open_client",
    "send_now",
    "spans",
]
