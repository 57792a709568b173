"""The conversation with MLflow about one run; every method may raise, and may be repeated."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

from infra.ledger import EvaluationRecord, Ledger, RunRecord, RunStatus, UpdateRow
from infra.settings import Settings
from infra.tracking.artifacts import experiment_location, put_artifact
from infra.tracking.charts import METRICS, chart_html, chart_png
from infra.tracking.client import (
    POINTS_PER_BATCH,
    RUN_TAG,
    Destination,
    TrackingError,
    batches,
    explain,
    find_run,
    is_refusal,
    milliseconds,
    open_client,
    points,
    set_tags,
)
from infra.tracking.description import datasets, describe
from infra.tracking.evaluations import send_evaluation, settings_tags
from infra.tracking.models import Models
from infra.tracking.registry import SCHEME, model_version
from infra.tracking.rollouts import NotableRollouts
from infra.tracking.study import study_run
from infra.tracking.system import SystemMetrics
from sao_core.config import ConfigError, TrainConfig

logger = logging.getLogger("infra.tracking")

_UPDATES_AT_ONCE = 200
_CHART_SHARE = 0.01
"""Share of a running run's time that drawing its charts may take."""

_STATUS = {
    RunStatus.RUNNING: "RUNNING",
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.CANCELLED: "KILLED",
    RunStatus.INTERRUPTED: "KILLED",
}


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


class Sender:
    """Brings one run in MLflow into line with the ledger.

    Params, metrics and evaluations need what a :class:`TrackedLedger` has; logged models, traces and charts a ledger.
    """

    def __init__(self, ledger: TrackedLedger, run_id: str, settings: Settings, config: TrainConfig) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._settings = settings
        self._config = config
        self._client: Any = None
        self._there: Destination | None = None
        self._shown_status: RunStatus | None = None
        self._step = -1
        self._evaluation = 0
        self._sent: dict[str, set[int]] = {}
        self._refused: set[str] = set()
        self._system: SystemMetrics | None = None
        whole = ledger if isinstance(ledger, Ledger) else None
        self._models = None if whole is None else Models(whole, settings, run_id)
        self._rollouts = None if whole is None else NotableRollouts(whole, settings, run_id, config.tracking.traces)
        self._charts = None if whole is None else RunCharts(whole, settings, run_id)

    def send(self, status: RunStatus | None) -> None:
        """Everything that is new, what matters most first; then, if the run is over, what is made at its end."""
        run = self._ledger.run(self._run_id)
        there = self._there or self._connect(run)
        self._send_updates(there)
        new = self._ledger.evaluations(self._run_id, self._evaluation)
        children = self._send_evaluations(there, new)
        self._show_status(there, status, run)
        models, rollouts = self._models, self._rollouts
        if models is not None:
            with self._refusal_is_told("the models"):
                models.send(there, children, self._datasets[1])
        for evaluation in new:
            if rollouts is not None and models is not None:
                with self._refusal_is_told(f"the rollouts of step {evaluation.step}"):
                    model_id = models.model_id(evaluation.policy_sha256)
                    rollouts.send(there, evaluation, children[evaluation.number], model_id)
            self._evaluation = evaluation.number
            self._ledger.set_watermark(self._run_id, self._evaluation, "evaluation")
        if models is not None and status is RunStatus.COMPLETED:
            with self._refusal_is_told("the registered model"):
                models.register_newest(there, self._ledger.run(self._run_id))
        if self._charts is not None:
            self._charts.send(there, news=bool(new), last=status is not None and status is not RunStatus.RUNNING)

    def idle_s(self) -> float | None:
        """Seconds until there is something to send even without news; None: not before there are."""
        return None if self._system is None else self._system.due_in()

    def sample(self) -> None:
        """Send what the machine is busy with, if it is time."""
        if self._there is not None:
            if self._system is None:
                self._system = SystemMetrics(self._ledger.run(self._run_id).created_at)
            self._system.send(self._there)

    @contextmanager
    def _refusal_is_told(self, what: str) -> Iterator[None]:
        """What MLflow will never take must not hold up the rest: it is told once, and left out."""
        try:
            yield
        except Exception as error:
            if not is_refusal(error):
                raise
            if what not in self._refused:
                logger.warning("MLflow refuses %s: %s", what, explain(error, self._settings.tracking_uri))
            self._refused.add(what)

    @cached_property
    def _datasets(self) -> tuple[Any, Any]:
        return datasets(self._config)

    def _connect(self, run: RunRecord) -> Destination:
        """Find or create experiment and run, and describe the run."""
        if self._client is None:
            self._client = open_client(self._settings.tracking_uri)
        experiment_id = self._experiment(self._config.tracking.experiment or run.recipe)
        found = self._linked(run) or find_run(self._client, experiment_id, RUN_TAG, self._run_id)
        if found is None:
            tags = {RUN_TAG: self._run_id, **self._model_version()}
            found = self._client.create_run(experiment_id, milliseconds(run.created_at), tags, self._run_id)
        else:
            self._step = self._ledger.watermark(self._run_id, "update")
            self._evaluation = self._ledger.watermark(self._run_id, "evaluation")
        info = found.info
        study = self._config.tracking.study
        parent = None if study is None else study_run(self._client, info.experiment_id, study)
        superseded = self._ledger.superseded_steps(self._run_id)
        describe(self._client, found, run, self._config, self._settings, superseded=superseded, parent=parent)
        self._client.log_inputs(info.run_id, datasets=list(self._datasets))
        self._ledger.set_run_links(self._run_id, mlflow_run_id=info.run_id)
        self._there = Destination(
            self._client, self._settings.tracking_uri, info.experiment_id, info.run_id, info.artifact_uri
        )
        return self._there

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name, experiment_location(self._settings, name)))

    def _model_version(self) -> dict[str, str]:
        """A tag that says which version a new run starts from, where an alias names it: the alias will move on."""
        path = self._config.model.path
        try:
            version = model_version(self._client, path) if path.startswith(SCHEME) else None
        except (ConfigError, TrackingError):  # nothing that a run could have started from
            version = None
        return {} if version is None else {"model_version": str(version)}

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

    def _send_updates(self, there: Destination) -> None:
        while updates := self._ledger.updates_since(self._run_id, self._step, _UPDATES_AT_ONCE):
            again = set(self._ledger.superseded_steps(self._run_id))
            found = [
                point
                for u in updates
                for point in points(u.metrics, step=u.step, at=u.committed_at)
                if u.step not in again or u.step not in self._steps_sent(there, point.key)
            ]
            for some in batches(found, POINTS_PER_BATCH):
                there.client.log_batch(there.run_id, metrics=some, synchronous=True)
            self._step = updates[-1].step
            self._ledger.set_watermark(self._run_id, self._step, "update")

    def _steps_sent(self, there: Destination, key: str) -> set[int]:
        """Steps of a metric that MLflow had at first sight: a kill may come between a point and the watermark."""
        if key not in self._sent:
            history = there.client.get_metric_history(there.run_id, key)
            self._sent[key] = {point.step for point in history}
        return self._sent[key]

    def _send_evaluations(self, there: Destination, new: list[EvaluationRecord]) -> Mapping[int, str]:
        """Send results; returns the MLflow run of each by its number."""
        if not new:
            return {}
        everything = self._ledger.evaluations(self._run_id)
        if self._config.evaluation.alone:
            set_tags(there.client, there.run_id, settings_tags(new[-1]))
        return {
            one.number: send_evaluation(
                there, self._run_id, one, [e for e in everything if e.number < one.number], self._datasets[1]
            )
            for one in new
        }

    def _show_status(self, there: Destination, status: RunStatus | None, run: RunRecord) -> None:
        if status is None or status is self._shown_status:
            return
        if status is RunStatus.RUNNING:
            there.client.update_run(there.run_id, status="RUNNING")
        else:
            ended_at = None if run.ended_at is None else milliseconds(run.ended_at)
            there.client.set_terminated(there.run_id, _STATUS[status], ended_at)
        self._shown_status = status


class RunCharts:
    """The chart artifacts of a run, drawn again with every evaluation and at the end."""

    def __init__(self, ledger: Ledger, settings: Settings, run_id: str) -> None:
        self._ledger = ledger
        self._settings = settings
        self._run_id = run_id
        self._updates: list[UpdateRow] = []
        """All of them, each with only the metrics that are shown."""
        self._wanted = False
        self._not_before = 0.0

    def send(self, there: Destination, *, news: bool, last: bool) -> None:
        """Draw and send, if there are news or it is the last time; while the run lasts it may wait for its turn."""
        self._wanted = self._wanted or news or last
        if not self._wanted or (time.monotonic() < self._not_before and not last):
            return
        step = self._updates[-1].step if self._updates else -1
        for update in self._ledger.updates_since(self._run_id, step):
            shown = {name: update.metrics[name] for name in METRICS if name in update.metrics}
            self._updates.append(replace(update, metrics=shown))
        evaluations = self._ledger.evaluations(self._run_id)
        begun = time.thread_time()
        self._wanted = False
        try:
            png = chart_png(self._updates, evaluations, self._run_id)
            page = chart_html(self._updates, evaluations, self._run_id)
        except Exception as error:  # fonts, caches: a chart that cannot be drawn must not hold up what comes after
            logger.warning("the charts of %s cannot be drawn: %s: %s", self._run_id, type(error).__name__, error)
            return
        self._wanted = True
        self._not_before = time.monotonic() + (time.thread_time() - begun) / _CHART_SHARE
        put_artifact(there, self._settings, "charts/training.png", png)
        put_artifact(there, self._settings, "charts/training.html", page.encode())
        self._wanted = False
