"""From `sao evaluate` to results: what a target and a suite make a run of, what is there already, and the flows here.

Prefect is imported only when its server's address is set. Progress goes to standard error, results are the caller's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from flows.evaluation_view import EvaluationProgress
from flows.launch import explain_failure, leave, prefect_here, run_flow
from flows.preflight import preflight
from flows.suites import Suite, evaluation_config, load_suite, suite_of_run
from infra.evaluated_model import model_sha256
from infra.evaluation_comparison import Evaluated
from infra.evaluations import LIMITS, code_of_evaluation
from infra.ledger import Ledger, LedgerError, RunStatus
from infra.objects import Corrupt, ObjectStoreError
from infra.settings import Settings
from infra.targets import RUN_SCHEME, model_path
from infra.training_run import new_run_id
from sao_core.config import ConfigError, TrainConfig, parse_config


@dataclass(frozen=True)
class Planned:
    """An evaluation that is to be made, or was made."""

    config: TrainConfig
    run_id: str
    done: bool = False


def suite_for(suite: str | None, target: str, changes: Mapping[str, Any], ledger: Ledger) -> Suite:
    """The suite of this name or file; None: the held-out tasks of the run ``target``.

    Raises:
        ConfigError: there is none, or ``changes`` do not fit it.
    """
    if suite is not None:
        return load_suite(suite, changes)
    if not ledger.has_run(target):
        raise ConfigError(f"name a suite for {target}: --suite NAME or --suite FILE.jsonl; `sao suites` lists them")
    return suite_of_run(parse_config(ledger.run(target).config), changes)


def planned(
    ledger: Ledger,
    settings: Settings,
    target: str,
    suite: Suite,
    machine: Mapping[str, Any],
    *,
    checkpoint: str | None = None,
    reuse: bool = False,
) -> Planned:
    """The run that evaluates a target on a suite; with ``reuse``, one that did the same before if there is one.

    Raises:
        ConfigError: it cannot be made; one line that names why and the way out.
    """
    path = model_path(target, ledger, checkpoint)
    run_id = path.removeprefix(RUN_SCHEME).rpartition("@")[0] if path.startswith(RUN_SCHEME) else None
    like = ledger.run(run_id).config if run_id is not None and ledger.has_run(run_id) else None
    config = evaluation_config(suite, path, machine, like)
    folder = preflight(config, settings, training=False)
    before = _same_before(ledger, config, folder) if reuse and folder != "tiny" else None
    return before or Planned(config, new_run_id(config.recipe))


def resumed(ledger: Ledger, settings: Settings, run_id: str) -> Planned:
    """An evaluation that was interrupted, to go on with.

    Raises:
        UnknownRun: there is no such run.
        ConfigError: it is no evaluation, or what it needs is gone.
    """
    run = ledger.run(run_id)
    config = parse_config(run.config)
    if not config.evaluation.alone:
        raise ConfigError(f"run {run_id} is a training run: go on with it by `sao train --resume {run_id}`")
    if run.status is RunStatus.COMPLETED:
        return Planned(config, run_id, done=True)
    preflight(config, settings, resuming=ledger.newest_policy(run_id) is not None, training=False)
    return Planned(config, run_id)


def evaluate_here(
    ledger: Ledger, settings: Settings, wanted: Sequence[Planned], finish: Callable[[], int], console: Console
) -> NoReturn:
    """Make the evaluations that are not done, one after the other, then ``finish``; leaves with the exit code."""
    settings.home.mkdir(parents=True, exist_ok=True)
    missing = [one for one in wanted if not one.done]
    if not missing:
        leave(_finished(finish))
    with prefect_here(settings, console):
        for one in missing:
            console.print(f"evaluation {one.run_id} · {one.config.model.path} · state in {settings.home}", **_PLAIN)
            with EvaluationProgress(ledger, one.run_id, console):
                error = run_flow("flows.evaluate:evaluate", one.config, settings, one.run_id)
            code = _conclude(ledger, settings, one.run_id, error, console)
            if code:
                leave(code)
        leave(_finished(finish))


_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}


def _conclude(ledger: Ledger, settings: Settings, run_id: str, error: BaseException | None, console: Console) -> int:
    """Say how an evaluation ended, unless it is complete; returns the exit code."""
    run = ledger.run(run_id) if ledger.has_run(run_id) else None
    if run is not None and run.status is RunStatus.COMPLETED:
        return 0
    if isinstance(error, ConfigError):
        sys.stderr.write(f"error: {error}\n")
        return 2
    if run is None or run.status is not RunStatus.CANCELLED:
        text, code = explain_failure(settings, run_id, error, run.message if run else None)
        console.print(text, **_PLAIN)
    else:
        text, code = "stopped; what is answered is kept", 1
        console.print(text, **_PLAIN)
    if run is not None and code != 2:
        console.print(f"continue with: sao evaluate --resume {run_id}", **_PLAIN)
    return code


def _finished(finish: Callable[[], int]) -> int:
    """What ``finish`` returns; its errors are told here, since nothing of this process may be waited for any more."""
    try:
        return finish()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (LedgerError, ObjectStoreError, Corrupt, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def newest(ledger: Ledger, run_id: str) -> Evaluated:
    """The one result of an evaluation that stands alone."""
    return Evaluated(run_id, ledger.evaluations(run_id)[-1])


def _same_before(ledger: Ledger, config: TrainConfig, folder: str) -> Planned | None:
    """A complete evaluation of the same weights on the same tasks by the same, unchanged code."""
    code = code_of_evaluation()
    if code["dirty"] == "true":
        return None
    sha256 = model_sha256(Path(folder).expanduser())
    mine = _asked(config.model_dump(mode="json"))
    for run in ledger.runs():
        alike = run.config["recipe"] == config.recipe and run.status is RunStatus.COMPLETED
        if alike and _asked(parse_config(run.config).model_dump(mode="json")) == mine:
            records = ledger.evaluations(run.run_id)
            if records and (records[-1].policy_sha256, records[-1].settings.get("code")) == (sha256, code):
                return Planned(parse_config(run.config), run.run_id, done=True)
    return None


def _asked(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a configuration what decides the answers, the weights left out."""
    limits = {name: config["rollout"][name] for name in LIMITS}
    return config["seed"], config["environment"], config["evaluation"], config["model"]["dtype"], limits
