"""MLflow: the one writer. The ledger is the queue; a thread sends what lies beyond its watermark.

    learner ── commit ──▶ ledger ── updates_since(watermark) ──▶ thread ── log_batch ──▶ MLflow
    flow ───── poke ─────────────────────────────────────────────▲

Never fatal, never blocking: the flow only sets an event. Points carry the ledger's times, so a point sent twice is the
same point; what could not be sent by the end is sent by the run's next start, or by `sync`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar

from infra.ledger import EvaluationRecord, RunRecord, RunStatus, UpdateRow
from infra.settings import Settings
from sao_core.config import TrainConfig

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 10.0
"""Longest that the end of a run waits for MLflow."""

RUN_TAG = "sao.run"
"""Holds the run's id in MLflow; by it the run is found again."""

_EVALUATION_TAG = "sao.evaluation"
_SEND_INTERVAL_S = 2.0
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)
_UPDATES_AT_ONCE = 200
_POINTS_PER_BATCH = 900
_PARAMS_PER_BATCH = 90
_VALUE_LENGTH = 5000
_STATUS = {
    RunStatus.RUNNING: "RUNNING",
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.CANCELLED: "KILLED",
    RunStatus.INTERRUPTED: "KILLED",
}
_ENVIRONMENT = {
    # A request that hangs is cut soon and tried again by the thread here, not by the client for minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
T = TypeVar("T")


class TrackedLedger(Protocol):
    """What tracking needs of :class:`infra.ledger.Ledger`."""

    def run(self, run_id: str) -> RunRecord:
        """One run."""

    def updates_since(self, run_id: str, watermark: int, limit: int | None = None) -> list[UpdateRow]:
        """Surviving updates after a step, in order."""

    def superseded_steps(self, run_id: str) -> list[int]:
        """Steps that a rewind undid."""

    def evaluations(self, run_id: str, after: int = 0) -> list[EvaluationRecord]:
        """Evaluation results after a number, in order."""

    def watermark(self, run_id: str, kind: Literal["update", "evaluation"] = "update") -> int:
        """How far everything was sent."""

    def set_watermark(self, run_id: str, value: int, kind: Literal["update", "evaluation"] = "update") -> None:
        """Move a watermark, never back."""

    def set_run_links(self, run_id: str, mlflow_run_id: str | None = None) -> None:
        """Store where the run is seen."""


class Tracker:
    """Sends one training run to MLflow from a thread of its own.

    Experiment: ``tracking.experiment`` or the recipe's name. One MLflow run per training run, kept through resumes; its
    evaluations are child runs, and their metrics stand on the parent too.
    """

    def __init__(self, ledger: TrackedLedger, run_id: str, settings: Settings, config: TrainConfig) -> None:
        self._sender = _Sender(ledger, run_id, settings, config)
        self._run_id = run_id
        self._where = settings.tracking_uri
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
        """Send what the ledger holds beyond the watermark, with the run's status there, now; whether it worked."""
        try:
            _Sender(ledger, run_id, settings, config).send(ledger.run(run_id).status)
        except Exception as error:
            logger.warning("MLflow at %s: %s", settings.tracking_uri, _first_line(error))
            return False
        return True

    def _work(self) -> None:
        failures = 0
        while not (self._all_sent or self._abandoned.is_set()):
            closing = self._closing.is_set()
            try:
                self._sender.send(self._final if closing else RunStatus.RUNNING)
            except Exception as error:
                if failures == 0:
                    reason = _first_line(error)
                    logger.warning("MLflow at %s: %s; training goes on and keeps trying", self._where, reason)
                pause = self._abandoned if closing else self._closing
                pause.wait(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
                failures += 1
                continue
            failures = 0
            self._all_sent = closing
            if not closing:
                self._closing.wait(_SEND_INTERVAL_S)  # several steps share a request
                self._wake.wait()
                self._wake.clear()


class _Sender:
    """The conversation with MLflow; every method may raise, and may be repeated."""

    def __init__(self, ledger: TrackedLedger, run_id: str, settings: Settings, config: TrainConfig) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._settings = settings
        self._config = config
        self._client: Any = None
        self._mlflow_run_id: str | None = None
        self._shown_status: RunStatus | None = None
        self._step = -1
        self._evaluation = 0
        self._sent: dict[str, set[int]] = {}

    def send(self, status: RunStatus | None) -> None:
        """Everything that is new, then the status."""
        run = self._ledger.run(self._run_id)
        if self._mlflow_run_id is None:
            self._connect(run)
        self._send_updates()
        self._send_evaluations()
        if status is not None and status is not self._shown_status:
            if status is RunStatus.RUNNING:
                self._client.update_run(self._mlflow_run_id, status="RUNNING")
            else:
                ended_at = None if run.ended_at is None else _milliseconds(run.ended_at)
                self._client.set_terminated(self._mlflow_run_id, _STATUS[status], ended_at)
            self._shown_status = status

    def _connect(self, run: RunRecord) -> None:
        """Find or create experiment and run, and describe the run."""
        if self._client is None:
            self._client = open_client(self._settings.tracking_uri)
        experiment_id = self._experiment(self._config.tracking.experiment or run.recipe)
        found = self._linked(run) or self._find(experiment_id, RUN_TAG, self._run_id)
        if found is None:
            tags = {RUN_TAG: self._run_id}
            found = self._client.create_run(experiment_id, _milliseconds(run.created_at), tags, self._run_id)
        else:
            self._step = self._ledger.watermark(self._run_id, "update")
            self._evaluation = self._ledger.watermark(self._run_id, "evaluation")
        self._describe(found, run)
        self._ledger.set_run_links(self._run_id, mlflow_run_id=found.info.run_id)
        self._mlflow_run_id = found.info.run_id

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        local = self._settings.tracking_uri.startswith("sqlite:")
        location = (self._settings.artifacts / re.sub(r"[^\w.-]", "_", name)).as_uri() if local else None
        return str(self._client.create_experiment(name, location))

    def _linked(self, run: RunRecord) -> Any:
        """The run that the ledger names, unless it is unknown here (another MLflow than the last time)."""
        from mlflow.exceptions import MlflowException

        if run.mlflow_run_id is None:
            return None
        try:
            return self._client.get_run(run.mlflow_run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _find(self, experiment_id: str, tag: str, value: str) -> Any:
        runs = self._client.search_runs([experiment_id], f"tags.`{tag}` = '{value}'", max_results=1)
        return runs[0] if runs else None

    def _describe(self, found: Any, run: RunRecord) -> None:
        """Params and tags. A param never changes in MLflow: what a resume changed is told in a tag."""
        from mlflow.entities import Param

        params = flatten(self._config.model_dump(mode="json"))
        known = found.data.params
        missing = [Param(key, value) for key, value in params.items() if key not in known]
        for some in _batches(missing, _PARAMS_PER_BATCH):
            self._client.log_batch(found.info.run_id, params=some, synchronous=True)
        changed = {key: value for key, value in params.items() if known.get(key, value) != value}
        tags = {
            "algorithm": run.algorithm,
            "recipe": run.recipe,
            "environment": self._config.environment.name,
            "model": self._config.model.path,
            "seed": str(self._config.seed),
            "mlflow.source.git.commit": _git_commit(),
            "prefect_flow_run_id": run.prefect_flow_run_id,
            "prefect_flow_run_url": self._flow_run_url(run),
            "superseded_steps": spans(self._ledger.superseded_steps(self._run_id)),
            "changed_params": json.dumps(changed) if changed else None,
        }
        self._tag(found.info.run_id, {key: value for key, value in tags.items() if value})

    def _flow_run_url(self, run: RunRecord) -> str | None:
        api = self._settings.prefect_api_url
        if api is None or run.prefect_flow_run_id is None:
            return None
        return f"{api.rstrip('/').removesuffix('/api')}/runs/flow-run/{run.prefect_flow_run_id}"

    def _tag(self, mlflow_run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        some = [RunTag(key, value[:_VALUE_LENGTH]) for key, value in tags.items()]
        self._client.log_batch(mlflow_run_id, tags=some, synchronous=True)

    def _send_updates(self) -> None:
        while updates := self._ledger.updates_since(self._run_id, self._step, _UPDATES_AT_ONCE):
            again = set(self._ledger.superseded_steps(self._run_id))
            points = [
                point
                for u in updates
                for point in _points(u.metrics, step=u.step, at=u.committed_at)
                if u.step not in again or u.step not in self._steps_sent(point.key)
            ]
            for some in _batches(points, _POINTS_PER_BATCH):
                self._client.log_batch(self._mlflow_run_id, metrics=some, synchronous=True)
            self._step = updates[-1].step
            self._ledger.set_watermark(self._run_id, self._step, "update")

    def _steps_sent(self, key: str) -> set[int]:
        """Steps of a metric that MLflow had at first sight: a kill may come between a point and the watermark."""
        if key not in self._sent:
            history = self._client.get_metric_history(self._mlflow_run_id, key)
            self._sent[key] = {point.step for point in history}
        return self._sent[key]

    def _send_evaluations(self) -> None:
        for evaluation in self._ledger.evaluations(self._run_id, self._evaluation):
            self._send_evaluation(evaluation)
            self._evaluation = evaluation.number
            self._ledger.set_watermark(self._run_id, self._evaluation, "evaluation")

    def _send_evaluation(self, evaluation: EvaluationRecord) -> None:
        points = _points(evaluation.metrics, step=evaluation.step, at=evaluation.created_at)
        self._client.log_batch(self._mlflow_run_id, metrics=points, synchronous=True)
        experiment_id = self._client.get_run(self._mlflow_run_id).info.experiment_id
        key = f"{self._run_id}/{evaluation.suite}/{evaluation.version}"
        child = self._find(experiment_id, _EVALUATION_TAG, key)
        if child is None:
            at = _milliseconds(evaluation.created_at)
            tags = {
                _EVALUATION_TAG: key,
                "mlflow.parentRunId": self._mlflow_run_id,
                "suite": evaluation.suite,
                "step": str(evaluation.step),
                "policy_version": str(evaluation.version),
                "policy_sha256": evaluation.policy_sha256,
            }
            child = self._client.create_run(experiment_id, at, tags, f"{evaluation.suite} at step {evaluation.step}")
        self._client.log_batch(child.info.run_id, metrics=points, synchronous=True)
        self._client.set_terminated(child.info.run_id, "FINISHED", _milliseconds(evaluation.created_at))


def open_client(tracking_uri: str) -> Any:
    """An `MlflowClient` whose requests give up within seconds."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from mlflow import MlflowClient

    # It prints the traceback of what it raises anyway, past our log and into the terminal.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts; what MLflow refuses in a name becomes ``_``."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = prefix + _name(key)
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = (value if isinstance(value, str) else json.dumps(value))[:_VALUE_LENGTH]
    return flat


def spans(steps: Sequence[int]) -> str:
    """Ascending steps for people: ``3-5, 9``."""
    parts: list[tuple[int, int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], step)
        else:
            parts.append((step, step))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _points(metrics: Mapping[str, float], *, step: int, at: float) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(_name(key), float(value), _milliseconds(at), step) for key, value in metrics.items()]


def _name(key: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", key)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _git_commit() -> str | None:
    """The commit of the folder where the run was started, if it is a repository."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
