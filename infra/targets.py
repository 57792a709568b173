"""Whose weights are meant: a folder, `tiny`, a registered model, or a run's policy, and how they become a folder.

`run:RUN@STEP` in `model.path` is the policy of that step of a run of this installation. The files stay where they are;
they are fetched and their hashes checked.
"""

from __future__ import annotations

import difflib
from contextlib import closing
from pathlib import Path

from infra.checkpoints import find_checkpoint
from infra.ledger import Ledger, PolicyRecord
from infra.objects import ObjectStore
from infra.policy_store import PolicyGone, PolicyStore
from infra.settings import Settings
from infra.tracking.registry import SCHEME, checkpoint_policy, resolve_model
from sao_core.config import ConfigError

RUN_SCHEME = "run:"


def model_path(target: str, ledger: Ledger, checkpoint: str | None = None) -> str:
    """What `model.path` is for a target as people name it: `tiny`, a folder, `models:/NAME@champion`, or a run.

    Of a run it is the newest checkpoint's policy, or that of the ``checkpoint`` of this name or step.

    Raises:
        ConfigError: there is nothing of that name, or the run has no such checkpoint.
    """
    known_run = ledger.has_run(target)
    if checkpoint is not None and not known_run:
        raise ConfigError(f"--checkpoint is for runs only: {target} is none of {ledger.label}; leave it out")
    if known_run:
        return f"{RUN_SCHEME}{target}@{_step(ledger, target, checkpoint)}"
    if target == "tiny" or target.startswith((SCHEME, RUN_SCHEME)):
        return target
    if Path(target).expanduser().is_dir():
        return str(Path(target).expanduser().absolute())
    runs = [run.run_id for run in ledger.runs()]
    near = difflib.get_close_matches(target, runs, n=1, cutoff=0.5)
    hint = f"did you mean the run `{near[0]}`?" if near else "`sao runs` lists the runs there are"
    raise ConfigError(f"{target!r} is neither a run, a model folder, `tiny` nor models:/NAME@champion; {hint}")


def resolve_target(path: str, settings: Settings, ledger: Ledger | None = None) -> str:
    """The folder behind a `model.path` (`tiny` stays as it is); see also `infra.tracking.registry.resolve_model`.

    Raises:
        ConfigError: there is no such run or policy, or its files are gone; the message says the way out.
    """
    if not path.startswith(RUN_SCHEME):
        return resolve_model(path, settings, ledger)
    if ledger is not None:
        return _fetch(path, settings, ledger)
    with closing(Ledger(settings.database_url)) as own:
        return _fetch(path, settings, own)


def _fetch(path: str, settings: Settings, ledger: Ledger) -> str:
    policy = _policy(ledger, path)
    try:
        return str(
            PolicyStore(ObjectStore.from_settings(settings), ledger, settings.cache).fetch(
                policy.run_id, policy.version
            )
        )
    except PolicyGone as error:
        raise ConfigError(f"model.path={path}: {error}") from error


def _policy(ledger: Ledger, path: str) -> PolicyRecord:
    run_id, at, step = path.removeprefix(RUN_SCHEME).rpartition("@")
    if not at or not step.isdigit():
        raise ConfigError(f"model.path must be {RUN_SCHEME}RUN@STEP: got {path}")
    if not ledger.has_run(run_id):
        raise ConfigError(f"model.path={path}: there is no run {run_id} in {ledger.label}")
    return checkpoint_policy(ledger, run_id, int(step))


def _step(ledger: Ledger, run_id: str, checkpoint: str | None) -> int:
    """The step of a checkpoint; an evaluation has none, and its one policy is what it evaluated."""
    if checkpoint is None and not ledger.checkpoints(run_id):
        if ledger.run(run_id).config.get("evaluation", {}).get("alone") and ledger.newest_policy(run_id) is not None:
            return 0
        raise ConfigError(f"run {run_id} has no checkpoint yet: train it further, then evaluate it")
    return find_checkpoint(ledger, run_id, checkpoint).step
