"""A run's checkpoint as a Hugging Face folder that other programs, and this one, can start from."""

from __future__ import annotations

import shutil
from pathlib import Path

from infra.checkpoints import CheckpointStore, find_checkpoint
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.settings import Settings
from sao_core.config import ConfigError

OPTIMIZER_STATE = ("policy_engine", "critic_engine", "random.*", "learner.json", "manifest.json")
"""What a checkpoint holds beyond policy, tokenizer and critic."""


def export_run(ledger: Ledger, places: Settings, run_id: str, folder: Path, checkpoint: str | None = None) -> int:
    """Write policy, tokenizer and `critic/` of a checkpoint to ``folder``; returns its step.

    ``checkpoint`` is a name or a step; None takes the newest intact one. Raises :class:`ConfigError` if there is no
    such checkpoint, or ``folder`` is taken.
    """
    ledger.run(run_id)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: export into a new folder")
    store = CheckpointStore(ObjectStore.from_settings(places), ledger, run_id, places.cache, keep=1)
    try:
        if checkpoint is None:
            latest = store.latest()
        else:
            record = find_checkpoint(ledger, run_id, checkpoint)
            latest = record.step, store.fetch(record)
    finally:
        store.close()
    if latest is None:
        raise ConfigError(f"run {run_id} has no checkpoint yet: train it further, then export")
    step, source = latest
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft, ignore=shutil.ignore_patterns(*OPTIMIZER_STATE))
    if folder.exists():
        folder.rmdir()
    draft.rename(folder)
    return step


def keep_checkpoint(ledger: Ledger, run_id: str, name: str, step: int | None, *, release: bool) -> int:
    """Give the checkpoint of a step (None: the newest) a name, or take a name away; returns the step.

    Raises :class:`ConfigError` if there is no such checkpoint, or the name is another's or a number.
    """
    ledger.run(run_id)
    if release:
        record = find_checkpoint(ledger, run_id, name)
        ledger.name_checkpoint(run_id, record.step, None)
        return record.step
    if not name.strip() or name.isdigit():
        raise ConfigError(
            f"the name of a checkpoint must not be empty or a number, which would be a step: got {name!r}"
        )
    newest = ledger.latest_checkpoint(run_id)
    wanted = str(step) if step is not None else "newest" if newest is None else str(newest.step)
    record = find_checkpoint(ledger, run_id, wanted)
    taken = [r for r in ledger.checkpoints(run_id) if r.name == name and r.step != record.step]
    if taken:
        raise ConfigError(f"{name} is the checkpoint of step {taken[0].step} already: release it, or take another name")
    ledger.name_checkpoint(run_id, record.step, name)
    return record.step
