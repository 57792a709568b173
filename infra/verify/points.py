"""Whether MLflow shows a run as the ledger has it: one point per step that was sent, none from nowhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from infra.ledger import RunStatus
from infra.ledger.transitions import load_metrics
from infra.tracking import open_client
from infra.verify.accounts import Problem
from infra.verify.snapshot import Snapshot

METRICS = ("reward/mean", "time/step_s")
"""Metrics that an update has, and that nothing else writes."""


class NotReadable(Exception):
    """MLflow cannot be asked about the run; the message says why."""


def sent_points(s: Snapshot, tracking_uri: str | None) -> Mapping[str, Counter[int]]:
    """Metric → step → its points in MLflow.

    Raises:
        NotReadable: there is no MLflow to ask, or it does not answer within seconds.
    """
    if s.run.mlflow_run_id is None:
        raise NotReadable("the run is not in MLflow")
    if tracking_uri is None:
        raise NotReadable("no MLflow was named")
    if tracking_uri.startswith("sqlite:") and not Path(str(make_url(tracking_uri).database)).is_file():
        raise NotReadable(f"there is no {tracking_uri}")
    try:
        client: Any = open_client(tracking_uri)
        return {
            name: Counter(point.step for point in client.get_metric_history(s.run.mlflow_run_id, name))
            for name in METRICS
        }
    except Exception as error:  # MLflow's own, SQLAlchemy's, requests': each means that it cannot be read now
        first = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise NotReadable(f"MLflow at {tracking_uri} cannot be read: {first}") from error


def mlflow_points(s: Snapshot, sent: Mapping[str, Counter[int]]) -> Iterator[Problem]:
    """Every surviving step up to the watermark has one point of a metric that it has; no step has two.

    A step beyond the watermark may be on its way. Only what was a step once has a point: after a rewind those that were
    sent before stand. (A live run has made steps since the snapshot, and sent them.)
    """
    once = {row.step for row in s.updates}
    newest = max(once, default=0) if s.run.status == RunStatus.RUNNING else math.inf
    for name, points in sent.items():
        for step, count in sorted(points.items()):
            if count > 1:
                yield f"step {step}", f"MLflow has {count} points of {name}"
            if step not in once and step <= newest:
                yield f"step {step}", f"MLflow has a point of {name}, but there was no such step"
        for row in s.steps:
            if row.step <= s.run.tracked_step and not points[row.step] and name in load_metrics(row.metrics_json):
                yield f"step {row.step}", f"MLflow has no point of {name}: steps to {s.run.tracked_step} were sent"
