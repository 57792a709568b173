"""The commands of a team's installation: `sao bootstrap` and `sao worker`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infra.settings import Settings

app = typer.Typer()
console = Console()


@app.command()
def bootstrap(
    within: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="How long to wait for the services to come up.")
    ] = 300.0,
    working_dir: Annotated[
        Path | None,
        typer.Option(help="Where flow runs find relative paths, on every worker; default: a new folder for each run."),
    ] = None,
) -> None:
    """Set up a team's installation: bucket, ledger, work pool, deployments; a second time changes nothing."""
    from flows.bootstrap import bootstrap as set_up

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    set_up(Settings.from_environment(), say, within, working_dir)


@app.command()
def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Take those of this work queue only; may be repeated; default: of all."),
    ] = None,
    at_once: Annotated[int | None, typer.Option(min=1, help="Most flow runs at a time; default: no limit.")] = None,
    health_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Tell at 127.0.0.1:PORT/health whether it still polls.")
    ] = None,
) -> None:
    """Start the flow runs of the Prefect UI and of schedules on this machine, until SIGTERM or Ctrl-C."""
    from flows.worker import work

    sys.exit(work(Settings.from_environment(), queue or (), at_once, health_port))
