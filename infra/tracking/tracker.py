"""The thread that sends a run to MLflow: the flow only sets an event, and never waits but at the end, for seconds."""

from __future__ import annotations

import logging
import threading

from infra.ledger import LedgerError, RunStatus
from infra.objects import ObjectStoreError
from infra.refusals import without_password
from infra.settings import Settings
from infra.tracking.client import TrackingError, explain
from infra.tracking.sender import Sender, TrackedLedger
from sao_core.config import TrainConfig

logger = logging.getLogger("infra.tracking")

CLOSE_DEADLINE_S = 10.0
"""Longest that the end of a run waits for MLflow."""

_SEND_INTERVAL_S = 2.0
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)


class Tracker:
    """Sends one training run to MLflow from a thread of its own.

    Experiment: ``tracking.experiment`` or the recipe's name. One MLflow run per training run, kept through resumes; its
    evaluations are child runs, and their metrics stand on the parent too.
    """

    def __init__(self, ledger: TrackedLedger, run_id: str, settings: Settings, config: TrainConfig) -> None:
        self._sender = Sender(ledger, run_id, settings, config)
        self._run_id = run_id
        self._uri = settings.tracking_uri
        self._where = without_password(settings.tracking_uri)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._final: RunStatus | None = None
        self._all_sent = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self) -> None:
        """Begin to send; returns at once, whatever state MLflow is in."""
        self._thread.start()

    def poke(self) -> None:
        """Say that the ledger has news; takes microseconds."""
        self._wake.set()

    def close(self, status: RunStatus | str, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """Send the rest and the status, for ``deadline_s`` at most; whether everything arrived."""
        self._final = RunStatus(status)
        self._closing.set()
        self._wake.set()
        self._thread.join(deadline_s)
        self._abandoned.set()
        if not self._all_sent:
            logger.warning("MLflow at %s did not take everything; later: sao sync %s", self._where, self._run_id)
        return self._all_sent

    @staticmethod
    def sync(ledger: TrackedLedger, run_id: str, settings: Settings, config: TrainConfig) -> bool:
        """Send what MLflow still lacks, with the run's status in the ledger, now; whether it worked."""
        try:
            send_now(ledger, run_id, settings, config)
        except (LedgerError, ObjectStoreError, TrackingError) as error:
            logger.warning("%s", error)
            return False
        return True

    def _work(self) -> None:
        failures = 0
        news = True
        while not (self._all_sent or self._abandoned.is_set()):
            closing = self._closing.is_set()
            try:
                if news or closing:
                    self._sender.send(self._final if closing else RunStatus.RUNNING)
                if not closing:
                    self._sender.sample()
            except Exception as error:
                if failures == 0:
                    reason = explain(error, self._uri)
                    logger.warning("MLflow at %s: %s; training goes on and keeps trying", self._where, reason)
                pause = self._abandoned if closing else self._closing
                pause.wait(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
                failures += 1
                news = True
                continue
            failures = 0
            self._all_sent = closing
            if not closing:
                self._closing.wait(_SEND_INTERVAL_S)  # several steps share a request
                news = self._wake.wait(self._sender.idle_s())
                self._wake.clear()


def send_now(ledger: TrackedLedger, run_id: str, settings: Settings, config: TrainConfig) -> None:
    """Send what MLflow still lacks of a run.

    Raises:
        TrackingError: MLflow did not take it; the message says what to try.
        LedgerError, ObjectStoreError: what should be sent cannot be read.
    """
    try:
        Sender(ledger, run_id, settings, config).send(ledger.run(run_id).status)
    except (LedgerError, ObjectStoreError):
        raise
    except Exception as error:  # of MLflow, SQLAlchemy or requests: each means that it did not work
        reason = explain(error, settings.tracking_uri)
        raise TrackingError(f"MLflow at {without_password(settings.tracking_uri)}: {reason}") from error
