"""The commands for models: `sao promote` and `sao rollback` in MLflow's registry, `sao import-gguf` to bring one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from infra.ledger import Ledger
from infra.reach import FIRST_CONTACT_S
from infra.settings import Settings

app = typer.Typer()
console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def promote(
    run: str,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME|STEP", help="Which checkpoint; default: the newest.")
    ] = None,
    at_least: Annotated[float | None, typer.Option(help="Refuse a sampled reward below this.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Promote whatever speaks against it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a run's policy the champion of its recipe, if its evaluation is not worse than the champion's."""
    from infra.tracking import promotion

    places = Settings.from_environment()
    ledger = Ledger(places.database_url, first_contact_s=FIRST_CONTACT_S)
    _say(promotion.promote(ledger, places, run, checkpoint=checkpoint, at_least=at_least, force=force), as_json)


@app.command()
def rollback(
    name: Annotated[
        str | None, typer.Argument(help="The model, which is named after its recipe; default: the only one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the champion before the champion again."""
    from infra.tracking import promotion

    _say(promotion.rollback(Settings.from_environment(), name), as_json)


@app.command("import-gguf")
def import_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed package that ships one.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
) -> None:
    """Turn a GGUF file into a model folder that `model.path` takes."""
    from sao_core.models import gguf

    file = gguf.find_gguf(source)
    with Console(stderr=True).status(f"reading {file.name} …"):
        gguf.import_gguf(file, folder)
    console.print(f"{file.name} is in {folder}; train it with model.path={folder}", markup=False, soft_wrap=True)


def _say(done: Any, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(done.as_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        console.print(str(done), markup=False, highlight=False, soft_wrap=True)
