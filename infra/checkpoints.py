"""Checkpoints: stored beside the training loop, complete or absent, the last good one never deleted first.

A thread stores the folder, manifest last, then the ledger announces it, and only then older ones go. A damaged one
falls back to the one before it, loudly.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from infra.ledger import CheckpointRecord, Ledger
from infra.manifest import CorruptFolder, attempt_key, delete_folder, fetch_folder, put_folder
from infra.objects import ObjectStore
from sao_core.config import ConfigError

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        objects: ObjectStore,
        ledger: Ledger,
        run_id: str,
        cache: Path,
        *,
        keep: int,
        attempt: int | None = None,
    ) -> None:
        """Keep the ``keep`` newest and the named ones; ``cache`` holds downloads from a remote store."""
        self._objects = objects
        self._ledger = ledger
        self._run_id = run_id
        self._cache = cache / "checkpoints"
        self._keep = keep
        self._attempt = attempt
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._storing: Future[None] | None = None

    def save(self, step: int, folder: Path, before_announcing: Callable[[], None] | None = None) -> None:
        """Store a complete folder as the checkpoint of a committed step; returns before it is durable.

        The folder is given away: it is emptied and removed. One that is still being stored is waited for, and its
        failure raised here.
        """
        self.flush()
        self._storing = self._thread.submit(self._save, step, folder, before_announcing)

    def flush(self) -> None:
        """Wait until the checkpoint asked for is stored; raises what it failed with."""
        storing, self._storing = self._storing, None
        if storing is not None:
            storing.result()

    def close(self) -> None:
        """Flush, and end the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def latest(self) -> tuple[int, Path] | None:
        """The newest intact checkpoint as a local folder, every hash checked; None if there never was one.

        Raises:
            CorruptFolder: there are checkpoints, and all are damaged.
        """
        records = self._ledger.checkpoints(self._run_id)
        for record in records:
            try:
                return record.step, self.fetch(record)
            except CorruptFolder as error:
                logger.error("the checkpoint of step %d is damaged, falling back: %s", record.step, error)
        if records:
            steps = ", ".join(str(record.step) for record in records)
            raise CorruptFolder(f"run {self._run_id} cannot be resumed: its checkpoints of steps {steps} are damaged")
        return None

    def fetch(self, record: CheckpointRecord) -> Path:
        """One checkpoint as a local folder, every hash checked.

        Raises:
            CorruptFolder: it is damaged.
        """
        return fetch_folder(self._objects, record.object_key, record.sha256, self._cache)

    def _save(self, step: int, folder: Path, before_announcing: Callable[[], None] | None) -> None:
        self._ledger.require_attempt(self._run_id, self._attempt)
        if any(record.step == step for record in self._ledger.checkpoints(self._run_id)):
            shutil.rmtree(folder)
            return
        key = attempt_key(f"runs/{self._run_id}/checkpoints/{step}", self._attempt)
        sha256 = put_folder(self._objects, key, folder, move=True)
        shutil.rmtree(folder)
        if before_announcing is not None:
            before_announcing()
        replaced = self._ledger.set_checkpoint(self._run_id, step, key, sha256, attempt=self._attempt)
        if replaced is not None:
            delete_folder(self._objects, replaced)
        for record in self._ledger.remove_checkpoints(self._run_id, self._keep, attempt=self._attempt):
            delete_folder(self._objects, record.object_key)


def find_checkpoint(ledger: Ledger, run_id: str, checkpoint: str | None) -> CheckpointRecord:
    """The surviving checkpoint of this name or step, None: the newest.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    records = ledger.checkpoints(run_id)
    for record in records:
        if checkpoint is None or checkpoint in (record.name, str(record.step)):
            return record
    known = ", ".join(str(r.step) if r.name is None else f"{r.step} ({r.name})" for r in records) or "none yet"
    wanted = "checkpoint" if checkpoint is None else f"checkpoint `{checkpoint}`"
    raise ConfigError(f"run {run_id} has no {wanted}; there are: {known}")
