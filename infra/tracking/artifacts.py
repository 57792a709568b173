"""Files of an MLflow run: in the object store under `artifacts/`, beside the runs, or wherever MLflow keeps them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from infra.objects import ObjectStore
from infra.settings import Settings
from infra.tracking.client import Destination, is_direct

ROOM = "artifacts"
"""The room in the object store."""

PROXIED = "mlflow-artifacts"
"""The scheme by which an MLflow server names the place that it serves artifacts from."""


def experiment_location(settings: Settings, experiment: str) -> str | None:
    """Where a new experiment keeps its files; None leaves it to the server that is written to."""
    if not is_direct(settings.tracking_uri):
        return None
    folder = re.sub(r"[^\w.-]", "_", experiment)
    place = f"{settings.artifacts}/{folder}"
    return place if place.startswith("s3://") else Path(place).as_uri()


def put_artifact(there: Destination, settings: Settings, path: str, data: bytes) -> None:
    """Store a file of the run under ``path``; one that is there is replaced.

    Without a server in between it goes through our own store, whatever name MLflow has for the place.
    """
    key = _key(there, settings)
    if key is not None:
        ObjectStore.from_settings(settings).put(f"{key}/{path}", data, durable=False)
        return
    with tempfile.TemporaryDirectory(prefix="sao-artifact-") as folder:
        file = Path(folder, PurePosixPath(path).name)
        file.write_bytes(data)
        within = str(PurePosixPath(path).parent)
        there.client.log_artifact(there.run_id, str(file), None if within == "." else within)


def _key(there: Destination, settings: Settings) -> str | None:
    """The key in the object store of the run's artifacts; None if they are elsewhere."""
    if not is_direct(there.tracking_uri):
        return None
    uri = urlsplit(there.artifact_uri)
    if uri.scheme == PROXIED:  # an experiment that was made through the server over this database
        return f"{ROOM}/{uri.path.strip('/')}"
    place = unquote(uri.path) if uri.scheme in ("", "file") else there.artifact_uri
    root = f"{settings.artifacts}/"
    return f"{ROOM}/{place.removeprefix(root)}" if place.startswith(root) else None
