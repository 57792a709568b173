"""The commands of an installation: `sao up`, `sao status`, `sao down`, and rollout workers for somebody else's run."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.ledger import Ledger
from infra.reach import FIRST_CONTACT_S
from infra.settings import Settings

app = typer.Typer()
console = Console()


@app.command()
def up(
    prefect_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Where to serve Prefect; default: SAO_PREFECT_PORT or 4200.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Where to serve MLflow; default: SAO_MLFLOW_PORT or 5000.")
    ] = None,
) -> None:
    """Serve Prefect and MLflow here, with everything to start runs from the UI and on schedules, until Ctrl-C."""
    from flows.up import AlreadyUp
    from flows.up import up as serve

    places = Settings.from_environment()
    places = replace(
        places,
        prefect_port=prefect_port or places.prefect_port,
        mlflow_port=mlflow_port or places.mlflow_port,
    )
    try:
        serve(places, console)
    except AlreadyUp as running:
        console.print(str(running), highlight=False, markup=False, soft_wrap=True)


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What of `sao up` runs, where, and what it takes; the runs that train now."""
    from flows.up import service_states, supervisor_pid
    from flows.views import is_evaluation
    from infra.ledger import RunStatus

    places = Settings.from_environment()
    states, pid = service_states(places), supervisor_pid(places)
    ledger_made = not places.database_url.startswith("sqlite:") or (places.home / "ledger.db").exists()
    runs = [run for run in _ledger(places).runs() if run.status is RunStatus.RUNNING] if ledger_made else []
    if as_json:
        answer = {
            "supervisor_pid": pid,
            "services": [asdict(state) for state in states],
            "running": [{"run_id": run.run_id, "step": run.step} for run in runs],
        }
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return
    table = Table("service", "where", "processes", "memory")
    for state in states:
        memory = f"{state.memory_bytes / 1e6:.0f} MB" if state.processes else "–"
        table.add_row(state.name, state.url or "not running", str(state.processes or "–"), memory)
    console.print(table)
    console.print(f"sao up: process {pid}" if pid else "sao up does not run here", highlight=False)
    for run in runs:
        what = f"training: {run.run_id}, update {run.step} of {run.config['learner']['updates']}"
        if is_evaluation(run):
            what = f"evaluation: {run.run_id}"
        console.print(what, highlight=False, markup=False)


@app.command()
def down() -> None:
    """Stop the `sao up` of this home; runs keep a checkpoint."""
    from flows.up import down as stop

    places = Settings.from_environment()
    said = "stopped" if stop(places, console) else f"sao up does not run in {places.home}"
    console.print(said, highlight=False, markup=False)


@app.command()
def rollout(
    run: str,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes to add.")] = 1,
) -> None:
    """Make rollouts here for a run that is trained elsewhere, until it ends or Ctrl-C."""
    from infra.extra_workers import ExtraWorkers

    places = Settings.from_environment()
    crew = ExtraWorkers(places, _ledger(places), run, workers, lambda text: console.print(text, highlight=False))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: crew.request_stop("stopped; the run goes on without these workers"))
    console.print(crew.serve(), highlight=False, markup=False)


def _ledger(places: Settings) -> Ledger:
    return Ledger(places.database_url, first_contact_s=FIRST_CONTACT_S)
