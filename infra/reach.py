"""Whether the places of an installation can be used, asked as their clients ask: never `/health`, always logged in.

Each function returns what was found, in a line, or raises an error whose message says what is wrong, where, and what to
try. Prefect and MLflow are asked over HTTP, so that a check takes no second of imports.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import httpx

from infra.ledger import Ledger, LedgerError
from infra.objects import ObjectStore, ObjectStoreError
from infra.refusals import place, without_password
from infra.settings import Logins, Settings

FIRST_CONTACT_S = 5.0
"""How long a place is waited for that a person has just named."""


EVENT_S = 15.0
"""An event is written with those of five seconds."""


class ServerUnusable(RuntimeError):
    """Prefect or MLflow cannot be used; the message says what is wrong, where, and what to try."""


class ServerRefused(ServerUnusable):
    """The server answers and does not take the login, the address or the request: waiting does not help."""


EXPECTED = (LedgerError, ObjectStoreError, ServerUnusable, OSError)
"""What a check raises in words that need no explanation."""


def ledger(settings: Settings) -> str:
    """Open the ledger, bring its schema up to date and read it.

    Raises:
        LedgerError: it cannot be reached or used.
    """
    database = Ledger(settings.database_url, first_contact_s=FIRST_CONTACT_S)
    try:
        return f"{len(database.runs())} runs in {database.label}"
    finally:
        database.close()


def objects(settings: Settings) -> str:
    """Put an object, read it back and remove it.

    Raises:
        ObjectStoreError: the store cannot be reached or used.
    """
    store = ObjectStore(settings.object_store, endpoint_url=settings.s3_endpoint_url, patience_s=FIRST_CONTACT_S)
    store.meet()
    probe = f"doctor/{secrets.token_hex(8)}"  # several machines look at the same time
    store.put(probe, b"probe")
    store.get(probe)
    store.delete(probe)
    return f"{place(settings.object_store, settings.s3_endpoint_url)}, writable"


def prefect(settings: Settings, logins: Logins) -> str:
    """Ask Prefect for a flow run, which needs its database too.

    Raises:
        ServerUnusable: it cannot be reached or used.
    """
    if settings.prefect_api_url is None:
        return "a local server is started for the lifetime of a command"
    _ask("Prefect", settings.prefect_api_url, "flow_runs/filter", {"limit": 1}, logins.prefect, "PREFECT_API_URL")
    return without_password(settings.prefect_api_url)


def mlflow(settings: Settings, logins: Logins) -> str:
    """Ask MLflow for an experiment, under the name of the host that training uses.

    Raises:
        ServerUnusable: it cannot be reached or used.
    """
    uri = settings.tracking_uri
    if uri.startswith("http"):
        body = {"max_results": 1}
        path, variable = "api/2.0/mlflow/experiments/search", "MLFLOW_TRACKING_URI"
        _ask("MLflow", uri, path, body, logins.mlflow, variable, token=logins.mlflow_token)
    return without_password(uri)


def workers(settings: Settings, logins: Logins, pool: str) -> str:
    """Who waits for flow runs in a work pool of Prefect.

    Raises:
        ServerUnusable: nobody does, or Prefect cannot be used.
    """
    if settings.prefect_api_url is None:
        return "none needed: a command runs its flow itself"
    url, login = settings.prefect_api_url, logins.prefect
    found = _ask("Prefect", url, f"work_pools/{pool}/workers/filter", {}, login, "PREFECT_API_URL")
    online = sorted(worker["name"] for worker in found if worker["status"] == "ONLINE")
    if not online:
        raise ServerUnusable(
            f"no worker is online in the work pool {pool}: runs wait there; start one with `sao worker`"
        )
    return ", ".join(online)


def events(settings: Settings, logins: Logins) -> str:
    """Send Prefect an event and wait until it can be read: its services take it from the one to the other.

    Raises:
        ServerUnusable: it does not arrive, or Prefect cannot be used.
    """
    if settings.prefect_api_url is None:
        return "part of the local server"
    url, login, own_id = settings.prefect_api_url, logins.prefect, str(uuid4())
    event = {
        "id": own_id,
        "event": "sao.doctor",
        "occurred": datetime.now(UTC).isoformat(),
        "resource": {"prefect.resource.id": "sao.doctor"},
    }
    _ask("Prefect", url, "events", [event], login, "PREFECT_API_URL")
    began = time.monotonic()
    while time.monotonic() - began < EVENT_S:
        sought = {"filter": {"id": {"id": [own_id]}}, "limit": 1}
        if _ask("Prefect", url, "events/filter", sought, login, "PREFECT_API_URL")["events"]:
            return f"an event arrived after {time.monotonic() - began:.0f} s"
        time.sleep(1.0)
    raise ServerUnusable(
        f"the services of Prefect at {without_password(url)} take no events, so nothing is scheduled or watched: see "
        "that `prefect server services start` runs, and that it and the server use the same Redis"
    )


def require(settings: Settings, logins: Logins, *, tracking: bool, say: Callable[[str], None]) -> None:
    """Make sure, before a training begins, that what it needs can be used.

    MLflow that is merely away is only told of: a training sends it later what it missed.

    Raises:
        LedgerError, ObjectStoreError, ServerUnusable: what cannot be used, where, and what to try.
    """
    ledger(settings)
    if settings.object_store.startswith("s3://"):
        objects(settings)
    prefect(settings, logins)
    if tracking:
        try:
            mlflow(settings, logins)
        except ServerRefused:
            raise
        except ServerUnusable as away:
            say(f"{away} Training goes on without it; later: sao sync")


_ENDINGS = {
    "Prefect": "the address of a Prefect server ends in /api",
    "MLflow": "the address is that of its pages, without a path",
}
_LOGINS = {
    "Prefect": "PREFECT_API_AUTH_STRING (user:password)",
    "MLflow": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}


def _ask(
    what: str, url: str, path: str, body: object, login: str | None, variable: str, *, token: str | None = None
) -> Any:
    """What a server answers, as JSON."""
    where = f"{what} at {without_password(url)}"
    parts = urlsplit(url)
    if parts.username:  # a login in the address goes first, as with the libraries
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    user, _, password = (login or "").partition(":")
    try:
        answer = httpx.post(
            f"{without_password(url).rstrip('/')}/{path}",
            json=body,
            auth=(user, password) if login else None,
            headers={"Authorization": f"Bearer {token}"} if token and not login else None,
            timeout=FIRST_CONTACT_S,
        )
    except (httpx.TransportError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ServerUnusable(
            f"{where} cannot be reached ({reason}): is it running, and is {variable} right?"
        ) from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        did = "refuses the user name or password" if login or token else "asks for a user name and a password"
        raise ServerRefused(f"{where} {did}: set the right ones in {_LOGINS[what]}")
    if answer.status_code == httpx.codes.FORBIDDEN and "invalid host" in answer.text.lower():
        host = parts.netloc.rpartition("@")[2]
        raise ServerRefused(
            f"{where} refuses to be called {host}: start it with --allowed-hosts {host}, or use a name that it allows"
        )
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise ServerRefused(f"{where} forbids this user to do that: have its administrator allow it")
    if answer.is_server_error:
        raise ServerUnusable(f"{where} answers with error {answer.status_code}: look at its log, and at its database")
    try:
        return answer.raise_for_status().json() if answer.content else None
    except (httpx.HTTPStatusError, ValueError) as error:
        raise ServerRefused(
            f"what answers for {where} is not {what} ({answer.status_code}): correct {variable}; {_ENDINGS[what]}"
        ) from error
