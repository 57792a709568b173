"""A run's newest checkpoint as a Hugging Face folder that other programs, and this one, can start from."""

from __future__ import annotations

import shutil
from pathlib import Path

from infra.checkpoints import CheckpointStore
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.settings import Settings
from sao_core.config import ConfigError

OPTIMIZER_STATE = ("policy_engine", "critic_engine", "random.*", "learner.json", "manifest.json")
"""What a checkpoint holds beyond policy, tokenizer and critic."""


def export_run(ledger: Ledger, places: Settings, run_id: str, folder: Path) -> int:
    """Write policy, tokenizer and `critic/` of the newest intact checkpoint to ``folder``; returns its step.

    Raises :class:`ConfigError` if the run has no checkpoint yet, or ``folder`` is taken.
    """
    ledger.run(run_id)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: export into a new folder")
    objects = ObjectStore.from_settings(places)
    checkpoints = CheckpointStore(objects, ledger, run_id, places.cache, keep=1)
    try:
        latest = checkpoints.latest()
    finally:
        checkpoints.close()
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
