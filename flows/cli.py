"""The command `sao`. Exit codes: 0, 1 (the work failed), 2 (the input was wrong)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console
from rich.table import Column, Table

from flows.commands import evaluate, models, services, team
from flows.recipes import load_config, override_config, recipe_names, recipe_summary
from infra import reach
from infra.attempts import planned_changes
from infra.ledger import Ledger, LedgerError, RunStatus, UnknownRun
from infra.objects import Corrupt, ObjectStore, ObjectStoreError
from infra.processes import ChildFailed
from infra.reach import FIRST_CONTACT_S, ServerUnusable
from infra.refusals import without_password
from infra.services import ServiceFailed
from infra.settings import Logins, Settings, SettingsError
from infra.tracking import TrackingError, send_now
from infra.tracking.promotion import PromotionRefused
from sao_core.algorithms import describe_objective, resolve
from sao_core.config import ConfigError, TrainConfig, parse_config

app = typer.Typer(
    help="Train LLM agents with SAO: asynchronous rollouts, durable log-probabilities, Prefect flows, MLflow runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()
for part in (evaluate, services, models, team):
    app.add_typer(part.app)
DEFAULT_RECIPE = "tiny"
WORK_FAILED = (
    *(LedgerError, ObjectStoreError, Corrupt, ChildFailed),
    *(ServerUnusable, ServiceFailed, TrackingError, PromotionRefused),
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="A shipped recipe, or a YAML file; default: tiny.")] = None,
    settings_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting, e.g. policy.lr=1e-4."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run from its newest checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and what would start.")
    ] = False,
) -> None:
    """Train an agent, end to end."""
    from flows.launch import train_here
    from flows.preflight import preflight
    from infra.training_run import cpu_threads, new_run_id

    places = Settings.from_environment()
    if resume is None:
        config = load_config(recipe or DEFAULT_RECIPE, settings_ or ())
        run_id = new_run_id(config.recipe)
    else:
        config, run_id = resumed_config(places, resume, recipe, settings_ or ()), resume
    preflight(config, places, resuming=resume is not None)
    if dry_run:
        console.print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), markup=False, highlight=False)
        console.print(plan(config, places, cpu_threads(config)), markup=False, highlight=False)
        return
    reach.require(places, Logins.from_environment(), tracking=config.tracking.enabled, say=warn)
    train_here(config, places, run_id, console)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the shipped recipes."""
    summaries = {name: recipe_summary(name) for name in recipe_names()}
    if as_json:
        return print_json([{"recipe": name, "summary": summary} for name, summary in summaries.items()])
    table = Table("recipe", "what it trains")
    for name, summary in summaries.items():
        table.add_row(name, summary)
    return console.print(table)


@app.command()
def settings() -> None:
    """Every setting, its default and what it is for, as Markdown."""
    from flows.settings_page import settings_page

    sys.stdout.write(settings_page())


@app.command()
def runs(as_json: AsJson = False) -> None:
    """List training runs and evaluations, newest first."""
    from flows.views import run_summary

    places = Settings.from_environment()
    ledger = open_ledger(places)
    summaries = [run_summary(ledger, places, run) for run in ledger.runs()]
    if as_json:
        return print_json(summaries)
    if not summaries:
        return console.print("no runs yet; start one with: sao train tiny", markup=False)
    run_column = Column("run", no_wrap=True)
    table = Table(run_column, "status", "step", "reward", "explained variance", "sampled eval", "greedy eval")
    for row in summaries:
        suite = f"eval/{row['suite']}/"
        names = ("reward/mean", "value/explained_variance", f"{suite}reward_mean", f"{suite}greedy_reward_mean")
        numbers = (row["metrics"].get(name) for name in names)
        step = row["kind"] if row["kind"] == "evaluation" else str(row["step"])
        table.add_row(row["run_id"], row["status"], step, *("–" if n is None else f"{n:.3f}" for n in numbers))
    return console.print(table)


@app.command()
def show(run: str, as_json: AsJson = False) -> None:
    """Configuration, progress, last metrics, where the time goes, and links of a run."""
    from flows.views import print_run, run_summary

    places = Settings.from_environment()
    ledger = open_ledger(places)
    record = ledger.run(run)
    if as_json:
        return print_json(run_summary(ledger, places, record) | {"config": dict(record.config)})
    return print_run(ledger, places, record, console)


@app.command()
def trajectory(
    trajectory_id: str,
    file: Annotated[
        Path | None, typer.Argument(help="With --html: where to write the page, - to print it; default: ID.html.")
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page for browsers, which needs no network.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turns of a trajectory, each action token with its log-probability, advantage and value."""
    from flows.trajectory_view import print_trajectory, write_page
    from infra.viewer import trajectory_view

    if html and as_json:
        raise ConfigError("--html and --json exclude each other: leave one of them out")
    if file is not None and not html:
        raise ConfigError(f"{file} is written with --html only: add it, or leave the file out")
    places = Settings.from_environment()
    view = trajectory_view(open_ledger(places), places, trajectory_id)
    if as_json:
        return print_json(view)
    if html:
        return write_page(view, file, console)
    return print_trajectory(view, console)


@app.command()
def checkpoints(run: str, as_json: AsJson = False) -> None:
    """Complete checkpoints of a run, newest first: what `--resume` and `sao export` start from."""
    from flows.views import checkpoint_summaries, print_checkpoints

    places = Settings.from_environment()
    summaries = checkpoint_summaries(open_ledger(places), places, run)
    return print_json(summaries) if as_json else print_checkpoints(summaries, console)


@app.command()
def keep(
    run: str,
    name: Annotated[str, typer.Argument(help="A name of your choice, e.g. best.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
    release: Annotated[bool, typer.Option("--release", help="Take the name away again.")] = False,
) -> None:
    """Name a checkpoint, so that it is kept when newer ones replace it."""
    from flows.export import keep_checkpoint

    named = keep_checkpoint(open_ledger(Settings.from_environment()), run, name, step, release=release)
    what = f"is no longer called {name}" if release else f"is kept as {name}"
    console.print(f"the checkpoint of step {named} of {run} {what}", markup=False, highlight=False)


@app.command()
def export(
    run: str,
    folder: Path,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME|STEP", help="Which checkpoint; default: the newest.")
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder: policy, tokenizer, and the critic in `critic/`."""
    from flows.export import export_run

    places = Settings.from_environment()
    step = export_run(open_ledger(places), places, run, folder, checkpoint)
    console.print(f"step {step} of {run} is in {folder}; go on from it with model.path={folder}", markup=False)


@app.command()
def sync(run: str) -> None:
    """Send to MLflow what could not be sent while the run lasted."""
    places = Settings.from_environment()
    ledger = open_ledger(places)
    record = ledger.run(run)
    reach.mlflow(places, Logins.from_environment())
    send_now(ledger, run, places, parse_config(record.config))


@app.command()
def verify(run: str, as_json: AsJson = False) -> None:
    """Prove that nothing of a run was lost or trained twice, and that everything stored is intact."""
    from flows.checks import print_verification, verification_json
    from infra.verify import verify as verify_run

    places = Settings.from_environment()
    ledger, objects = open_ledger(places), open_objects(places)
    with Console(stderr=True).status(f"verifying {run} …") as status:
        found = verify_run(
            ledger,
            objects,
            run,
            tracking_uri=places.tracking_uri,
            say=lambda rule: status.update(f"verifying {run}: {rule} …"),
        )
    if as_json:
        print_json(verification_json(found))
    else:
        print_verification(found, console)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def upkeep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be done, and change nothing.")] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="How old an object must be before it is removed.")
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Expire leases, mark interrupted runs, and remove what nothing refers to; safe beside live runs."""
    from flows.checks import print_upkeep, upkeep_json
    from infra.upkeep import Upkeep

    places = Settings.from_environment()
    ledger, objects = open_ledger(places), open_objects(places)
    with Console(stderr=True).status("upkeep …"):
        actions = Upkeep(ledger, objects, places, grace_s=grace, dry_run=dry_run).everything()
        if places.prefect_api_url is not None:
            from tasks.upkeep import settle

            actions += settle(ledger, dry_run=dry_run)
    if as_json:
        print_json(upkeep_json(actions, grace, dry_run))
    else:
        print_upkeep(actions, dry_run, console)


@app.command()
def doctor(
    only: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]", help="Make these checks only, e.g. ledger,object-store.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What is installed, what is reachable, what would fail."""
    from flows.doctor import examine

    checks = examine(Settings.from_environment(), only.split(",") if only else ())
    if as_json:
        print_json([check.as_dict() for check in checks])
    elif only:
        for check in checks:
            console.print(f"{'ok' if check.ok else 'no'}  {check.name}: {check.found}", markup=False, soft_wrap=True)
    else:
        table = Table("", "check", "found")
        for check in checks:
            table.add_row("[green]ok[/green]" if check.ok else "[red]no[/red]", check.name, check.found)
        console.print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def resumed_config(places: Settings, run_id: str, recipe: str | None, overrides: Sequence[str]) -> TrainConfig:
    """The configuration that a run goes on with: its own, or a recipe's, with overrides; says what changes.

    Raises:
        UnknownRun: there is no such run.
        ConfigError: it would change what a resumed run keeps, or there is nothing left to train.
    """
    ledger = open_ledger(places)
    run = ledger.run(run_id)
    config = override_config(run.config, overrides) if recipe is None else load_config(recipe, overrides)
    planned = planned_changes(ledger, run_id, config)
    if run.status is RunStatus.COMPLETED and config.learner.updates <= run.step:
        raise ConfigError(
            f"run {run_id} is complete with its {run.step} updates; to train on: "
            f"sao train --resume {run_id} --set learner.updates={2 * run.step}"
        )
    for change in planned:
        console.print(f"changed: {change}", markup=False, highlight=False)
    return config


def plan(config: TrainConfig, places: Settings, threads: tuple[int, int, int]) -> str:
    """What a run would start, as text."""
    alone, learner, worker = threads
    ledger = Ledger.label_of(places.database_url)
    return (
        f"would start: 1 learner ({learner} threads, {alone} before the first update), {config.rollout.workers} "
        f"rollout workers ({worker} threads, {config.rollout.slots} slots each), 1 evaluator\n"
        f"{config.algorithm.name}: {describe_objective(resolve(config), config.algorithm)}\n"
        f"ledger {ledger} · objects {places.object_store} · MLflow {without_password(places.tracking_uri)} · "
        f"Prefect {without_password(places.prefect_api_url or 'a local server for the lifetime of the command')}"
    )


def open_ledger(places: Settings) -> Ledger:
    """The ledger of this installation; one that cannot be reached is said to be within seconds."""
    return Ledger(places.database_url, first_contact_s=FIRST_CONTACT_S)


def open_objects(places: Settings) -> ObjectStore:
    """The object store of this installation; one that cannot be reached is said to be within seconds."""
    objects = ObjectStore.from_settings(places)
    objects.meet()
    return objects


def warn(text: str) -> None:
    """Tell a person what goes on all the same."""
    sys.stderr.write(f"warning: {text}\n")


def print_json(value: Any) -> None:
    """Print JSON for programs: no colours, no wrapping."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def main() -> NoReturn:
    """Entry point: errors in the input are one line on standard error and exit code 2."""
    sys.path.append(str(Path.cwd()))  # an environment of one's own may lie where one works
    try:
        app()
    except (ConfigError, SettingsError, UnknownRun) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except WORK_FAILED as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
