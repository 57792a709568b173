"""Talking to MLflow: a client whose requests give up within seconds, and errors that say what to try.

Only `MlflowClient` is used, never the fluent `mlflow.*`: that has hooks which can hold the end of a process for hours.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

RUN_TAG = "sao.run"
"""Holds the run's id in MLflow; by it the run is found again."""

POINTS_PER_BATCH = 900
VALUE_LENGTH = 5000
REQUEST_TIMEOUT_S = 5

_ENVIRONMENT = {
    # A request that hangs is cut soon and tried again by the tracker's thread, not by the client for minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_REFUSALS = {
    *("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE"),
    *("RESOURCE_ALREADY_EXISTS", "RESOURCE_LIMIT_EXCEEDED"),
}
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""The second is what MLflow calls an alias that does not exist."""


class TrackingError(RuntimeError):
    """MLflow did not do what was asked of it; the message says where, what, and what to try."""


@dataclass(frozen=True)
class Destination:
    """Where a run is in MLflow."""

    client: Any
    tracking_uri: str
    experiment_id: str
    run_id: str
    """MLflow's, not ours."""
    artifact_uri: str


def open_client(tracking_uri: str) -> Any:
    """An `MlflowClient` whose requests give up within seconds."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from mlflow import MlflowClient

    # It prints the traceback of what it raises anyway, past our log and into the terminal.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri)


def is_direct(tracking_uri: str) -> bool:
    """Whether a tracking URI names a database, not a server."""
    return not tracking_uri.startswith(("http://", "https://"))


def is_absent(error: Exception) -> bool:
    """Whether MLflow says that there is no such thing."""
    return getattr(error, "error_code", None) in _ABSENT


def is_refusal(error: Exception) -> bool:
    """Whether MLflow would give the same answer again, so that trying once more is no use."""
    return getattr(error, "error_code", None) in _REFUSALS


def explain(error: Exception, tracking_uri: str) -> str:
    """One line on what went wrong and what to try, to come after the place where it did."""
    text = str(error)
    code = getattr(error, "error_code", None)
    causes = list(_causes(error))
    where = urlsplit(tracking_uri)
    if code == "UNAUTHENTICATED":
        return "wrong user or password (401): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    if code == "PERMISSION_DENIED" and "Host header" in text:
        host = where.netloc.rpartition("@")[2]
        return f"it does not serve under the name {host} (403): add that to --allowed-hosts of its server"
    if code == "PERMISSION_DENIED":
        return f"this user may not do that (403): {_first(text)}; ask for access, or use another account"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "nothing listens there (connection refused): start its server, or set MLFLOW_TRACKING_URI"
    if "Failed to resolve" in text:
        return f"there is no host {where.hostname} as seen from here: check MLFLOW_TRACKING_URI"
    if any(isinstance(cause, TimeoutError) for cause in causes) or "timed out" in text:
        return f"no answer within {REQUEST_TIMEOUT_S} s: its server is stuck, overloaded, or cut off from here"
    if code == "ENDPOINT_NOT_FOUND" or "not in a valid JSON format" in text:
        return "what answers there is no MLflow server: check MLFLOW_TRACKING_URI"
    return _first(f"{type(error).__name__}: {text}")


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut into pieces of at most ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def points(metrics: Mapping[str, float], *, step: int, at: float, **more: Any) -> list[Any]:
    """Metrics of a step as MLflow's entities; ``at`` in seconds since 1970."""
    from mlflow.entities import Metric

    return [Metric(key_name(key), float(value), milliseconds(at), step, **more) for key, value in metrics.items()]


def set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags of a run in one request."""
    from mlflow.entities import RunTag

    some = [RunTag(key, value[:VALUE_LENGTH]) for key, value in tags.items()]
    client.log_batch(run_id, tags=some, synchronous=True)


def find_run(client: Any, experiment_id: str, tag: str, value: str) -> Any:
    """The first run of an experiment with this tag, or None."""
    quote = '"' if "'" in value else "'"
    found = client.search_runs(
        [experiment_id], f"tags.`{tag}` = {quote}{value}{quote}", max_results=1, order_by=["attributes.start_time ASC"]
    )
    return found[0] if found else None


def key_name(key: str) -> str:
    """The name of a metric or param; what MLflow refuses in it becomes ``_``."""
    return re.sub(r"[^\w\-./ ]", "_", key)


def milliseconds(seconds: float) -> int:
    """Seconds since 1970 as MLflow counts time."""
    return round(seconds * 1000)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[0][:300]
