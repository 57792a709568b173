"""Where a run can be looked at: pages of the servers that answer now, and the places behind them."""

from __future__ import annotations

from infra import pages
from infra.ledger import RunRecord
from infra.services import MLFLOW, PREFECT, running
from infra.settings import Settings


def mlflow_page(settings: Settings) -> str | None:
    """Where browsers see MLflow: as configured, or where `sao up` serves it now; None without either."""
    if settings.mlflow_pages is not None:
        return settings.mlflow_pages
    if settings.tracking_uri.startswith("http"):
        return settings.tracking_uri.rstrip("/")
    return running(settings, MLFLOW)


def prefect_page(settings: Settings) -> str | None:
    """As :func:`mlflow_page`, of Prefect."""
    return pages.configured_prefect(settings) or running(settings, PREFECT)


def mlflow_run(settings: Settings, run: RunRecord) -> str | None:
    """The page of a run in MLflow."""
    page = mlflow_page(settings)
    return f"{page}/#/runs/{run.mlflow_run_id}" if page and run.mlflow_run_id else None


def flow_run(settings: Settings, run: RunRecord) -> str | None:
    """The page of a run's flow run in Prefect."""
    return pages.flow_run(prefect_page(settings), run)


def places(settings: Settings, run: RunRecord) -> dict[str, str]:
    """Name → address of everything that belongs to a run and can be looked at now."""
    found = {
        "trajectories": f"{settings.object_store}/runs/{run.run_id}/trajectories",
        "MLflow run": mlflow_run(settings, run),
        "Prefect flow run": flow_run(settings, run),
        "logs": str(settings.logs(run.run_id)),
    }
    return {name: address for name, address in found.items() if address is not None}
