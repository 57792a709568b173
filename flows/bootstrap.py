"""`sao bootstrap`: from running services to an installation in which a training can be started.

Every step looks first and changes only what is missing, so a second run, or one beside another, changes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from infra import reach
from infra.ledger import LedgerRefused, LedgerTooNew
from infra.objects import ObjectStore, StoreRefused
from infra.refusals import without_password
from infra.services import prefect_environment
from infra.settings import Logins, Settings
from sao_core.config import ConfigError

POLL_S = 2.0

FINAL = (LedgerRefused, LedgerTooNew, StoreRefused, reach.ServerRefused)
"""Answers that waiting does not change."""


def bootstrap(settings: Settings, say: Callable[[str], None], within_s: float, working_dir: Path | None = None) -> None:
    """Make the bucket, the ledger's tables, the work pool, the deployments and the automation.

    ``within_s``: how long the services are waited for, all together. A refusal (a wrong password) ends the wait at
    once. ``working_dir``: where flow runs find relative paths; default: an empty folder for each.

    Raises:
        ConfigError: no Prefect server is named.
        LedgerError, ObjectStoreError, ServerUnusable: a service refuses, or did not come up in time.
    """
    if settings.prefect_api_url is None:
        raise ConfigError("bootstrap needs a Prefect server: set PREFECT_API_URL to its address, which ends in /api")
    logins, deadline = Logins.from_environment(), time.monotonic() + within_s
    wait("ledger", lambda: reach.ledger(settings), deadline, say)
    wait("object store", lambda: _bucket(settings), deadline, say)
    wait("object store", lambda: reach.objects(settings), deadline, say)
    wait("MLflow", lambda: reach.mlflow(settings, logins), deadline, say)
    wait("Prefect", lambda: reach.prefect(settings, logins), deadline, say)
    os.environ.update(prefect_environment(settings, None))
    from flows.deployments import deploy

    deploy(settings, lambda text: say(f"made {text}"), working_dir)
    say(f"ready: start a deployment in Prefect at {pages(settings.prefect_api_url)}")


def wait(name: str, look: Callable[[], str], deadline: float, say: Callable[[str], None]) -> None:
    """Look until it is there; say when the reason why it is not there changes, and raise the last one at the deadline.

    Raises:
        What ``look`` raises.
    """
    told = ""
    while True:
        try:
            return say(f"{name}: {look()}")
        except FINAL:
            raise
        except reach.EXPECTED as error:
            if time.monotonic() + POLL_S > deadline:
                raise
            if str(error) != told:
                told = str(error)
                say(f"{name}: waiting: {told}")
        time.sleep(POLL_S)


def pages(api_url: str) -> str:
    """Where the pages of a Prefect server are."""
    return without_password(api_url).rstrip("/").removesuffix("/api")


def _bucket(settings: Settings) -> str:
    store = ObjectStore(settings.object_store, endpoint_url=settings.s3_endpoint_url, patience_s=reach.FIRST_CONTACT_S)
    return "made the bucket" if store.make_bucket() else "the bucket is there"
