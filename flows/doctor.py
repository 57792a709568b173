"""Checks that `sao doctor` makes: what is installed, what is reachable, what would fail."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import httpx

from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.settings import Settings

PACKAGES = ("torch", "transformers", "deepspeed", "prefect", "mlflow", "sqlalchemy", "s3fs", "pyarrow")
LEAST_FREE_BYTES = 2 * 1024**3
TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Check:
    """One thing looked at, and what was found."""

    name: str
    ok: bool
    found: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine(places: Settings) -> list[Check]:
    """Make every check; none of them raises."""
    return [
        Check("python", sys.version_info >= (3, 11), sys.version.split()[0]),
        *(_package(name) for name in PACKAGES),
        Check("cores", True, str(len(os.sched_getaffinity(0)))),
        _look("state folder", lambda: _disk(places)),
        _look("ledger", lambda: _ledger(places)),
        _look("object store", lambda: _objects(places)),
        _look("Prefect", lambda: _prefect(places)),
        _look("MLflow", lambda: _mlflow(places)),
    ]


def _look(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _package(name: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "not installed")


def _disk(places: Settings) -> str:
    places.home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(places.home).free
    if free < LEAST_FREE_BYTES:
        raise OSError(f"only {free / 1024**3:.1f} GiB free in {places.home}; make room or set SAO_HOME")
    return f"{places.home}, {free / 1024**3:.0f} GiB free"


def _ledger(places: Settings) -> str:
    ledger = Ledger(places.database_url)
    return f"{len(ledger.runs())} runs in {ledger.label}"


def _objects(places: Settings) -> str:
    store = ObjectStore.from_settings(places)
    store.put("doctor/probe", b"probe")
    if store.get("doctor/probe") != b"probe":
        raise OSError(f"{places.object_store} gave back something else than was put")
    store.delete("doctor/probe")
    return f"{places.object_store}, writable"


def _prefect(places: Settings) -> str:
    if places.prefect_api_url is None:
        return "a local server is started for the lifetime of a command"
    httpx.get(f"{places.prefect_api_url.rstrip('/')}/health", timeout=TIMEOUT_S).raise_for_status()
    return places.prefect_api_url


def _mlflow(places: Settings) -> str:
    if not places.tracking_uri.startswith("http"):
        return places.tracking_uri
    # Not /health: it answers 200 to a Host header that the API refuses.
    url = f"{places.tracking_uri.rstrip('/')}/api/2.0/mlflow/experiments/search"
    httpx.post(url, json={"max_results": 1}, timeout=TIMEOUT_S).raise_for_status()
    return places.tracking_uri
