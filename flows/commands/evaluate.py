"""The commands about how good a model is: `sao evaluate`, `sao compare`, `sao predictions` and `sao suites`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infra.ledger import Ledger
from infra.reach import FIRST_CONTACT_S
from infra.settings import Logins, Settings
from sao_core.config import ConfigError

app = typer.Typer()
console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
EVALUATION = typer.Argument(metavar="EVALUATION", help="Its run, or RUN@STEP for one that was made while training.")


@app.command()
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="RUN|MODEL", help="A run, a model folder, models:/NAME@champion, or `tiny`."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A bundled suite, or a .yaml or .jsonl file; default: the run's tasks."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME|STEP", help="Which of the run's checkpoints; default: the newest.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Sampled rollouts per prompt.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of prompts and sampling.")] = None,
    settings_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any setting of the suite, of model or of rollout."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="RUN|MODEL", help="Evaluate this one too, unless it was, and compare.")
    ] = None,
    predictions_: Annotated[
        Path | None,
        typer.Option("--predictions", metavar="FILE.jsonl", help="Write the patches as SWE-bench predictions."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with an evaluation that was interrupted.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on a suite; every answer is stored like a trajectory."""
    from flows import evaluate_here as here
    from flows.evaluation_view import evaluation_json, print_comparison, print_evaluation
    from flows.suites import split_settings
    from infra import reach
    from infra.evaluation_comparison import compare as compare_two
    from infra.predictions import check_predictions_file

    places = Settings.from_environment()
    asked = {"samples": samples, "prompts": prompts, "temperature": temperature, "seed": seed}
    changes = {name: value for name, value in asked.items() if value is not None}
    if predictions_ is not None:
        check_predictions_file(predictions_)
    ledger = _ledger(places)
    if resume is not None:
        if target is not None or against is not None or suite is not None or changes or settings_:
            raise ConfigError(
                "--resume goes on with an evaluation as it was asked for: leave model, suite and settings out"
            )
        wanted = [here.resumed(ledger, places, resume)]
    else:
        if target is None:
            raise ConfigError("name what to evaluate: a run, a model folder, models:/NAME@champion, or `tiny`")
        more, machine = split_settings(settings_ or ())
        chosen = here.suite_for(suite, target, {**more, **changes}, ledger)
        both = against is not None
        wanted = [here.planned(ledger, places, target, chosen, machine, checkpoint=checkpoint, reuse=both)]
        if against is not None:
            wanted.append(here.planned(ledger, places, against, chosen, machine, reuse=True))
    reach.require(places, Logins.from_environment(), tracking=wanted[0].config.tracking.enabled, say=_warn)

    def finish() -> int:
        results = [here.newest(ledger, one.run_id) for one in wanted]
        comparison = compare_two(ledger, *results) if len(results) > 1 else None
        if predictions_ is not None:
            _write(ledger, places, results[0], predictions_, 1)
        if as_json:
            shown = [evaluation_json(one.run_id, one.record) for one in results]
            names = ("first", "second")
            together = dict(zip(names, shown, strict=False)) | {"comparison": comparison and comparison.as_dict()}
            _print_json(shown[0] if comparison is None else together)
            return 0
        for one in results:
            print_evaluation(one.run_id, one.record, console)
            text = f"evaluation {one.run_id}; its answers: sao show {one.run_id}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if comparison is not None:
            print_comparison(comparison, console)
        return 0

    here.evaluate_here(ledger, places, wanted, finish, Console(stderr=True))


@app.command()
def compare(
    first: Annotated[str, EVALUATION],
    second: Annotated[str, EVALUATION],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations of the same tasks prompt by prompt, with a p-value."""
    from flows.evaluation_view import print_comparison
    from infra.evaluation_comparison import compare as compare_two
    from infra.evaluation_comparison import find_evaluation

    ledger = _ledger(Settings.from_environment())
    comparison = compare_two(ledger, find_evaluation(ledger, first), find_evaluation(ledger, second))
    if as_json:
        return _print_json(comparison.as_dict())
    return print_comparison(comparison, console)


@app.command()
def predictions(
    evaluation: Annotated[str, EVALUATION],
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Where to write them.")],
    sample: Annotated[int, typer.Option(help="Which sampled answer of each prompt: 1, 2, …")] = 1,
) -> None:
    """Write an evaluation's patches as SWE-bench predictions, for the official harness."""
    from infra.evaluation_comparison import find_evaluation

    places = Settings.from_environment()
    ledger = _ledger(places)
    _write(ledger, places, find_evaluation(ledger, evaluation), file, sample)


@app.command()
def suites(as_json: AsJson = False) -> None:
    """List the bundled suites."""
    from flows.suites import suite_names, suite_summary

    summaries = {name: suite_summary(name) for name in suite_names()}
    if as_json:
        return _print_json([{"suite": name, "summary": summary} for name, summary in summaries.items()])
    table = Table("suite", "what it asks")
    for name, summary in summaries.items():
        table.add_row(name, summary)
    return console.print(table)


def _write(ledger: Ledger, places: Settings, evaluation: Any, file: Path, sample: int) -> None:
    """Write predictions and say what is in them, on standard error."""
    from infra.objects import ObjectStore
    from infra.predictions import write_predictions
    from infra.trajectory_store import TrajectoryStore

    store, errors = TrajectoryStore(ObjectStore.from_settings(places)), Console(stderr=True)
    with errors.status("reading the answers …") as status:
        written = write_predictions(
            ledger,
            store,
            evaluation,
            file,
            sample=sample,
            say=lambda done, total: status.update(f"reading the answers: {done} of {total} …"),
        )
    left_out = f", {written.missing} prompts without an answer left out" if written.missing else ""
    errors.print(
        f"{file}: {written.rows} predictions, {written.empty} of them without a patch{left_out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _ledger(places: Settings) -> Ledger:
    return Ledger(places.database_url, first_contact_s=FIRST_CONTACT_S)


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
