"""Addresses of pages in the Prefect UI, as configured; whether a server answers there is not asked."""

from __future__ import annotations

from infra.ledger import RunRecord
from infra.settings import Settings


def configured_prefect(settings: Settings) -> str | None:
    """Where browsers see the Prefect server that is set, whoever serves it; None if none is."""
    if settings.prefect_pages is not None:
        return settings.prefect_pages
    if settings.prefect_api_url is not None:
        return settings.prefect_api_url.rstrip("/").removesuffix("/api")
    return None


def flow_run(prefect: str | None, run: RunRecord) -> str | None:
    """The page of a run's flow run at the server ``prefect``; None without either."""
    return f"{prefect}/runs/flow-run/{run.prefect_flow_run_id}" if prefect and run.prefect_flow_run_id else None
