"""Policies on their way from the learner to the engines: stored whole, announced by the ledger, checked on arrival.

A version is a folder with a manifest; it is announced only after it is complete, and removed only when every live
worker has moved on.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from infra.ledger import Ledger, NewPolicy
from infra.manifest import attempt_key, delete_folder, fetch_folder, put_folder, sync_folder
from infra.objects import ObjectStore

CACHED_POLICIES = 4
CACHE_IDLE_S = 3600.0


class PolicyGone(RuntimeError):
    """The files of this policy version were removed by retention."""


class PolicyStore:
    """Policy folders in the object store; all runs share one."""

    def __init__(self, objects: ObjectStore, ledger: Ledger, cache: Path) -> None:
        """Keep policies in ``objects``; ``cache`` holds downloads from a remote store."""
        self.objects = objects
        self.ledger = ledger
        self._cache = cache / "policies"
        self._checked: dict[str, Path] = {}

    def put(
        self, run_id: str, version: int, folder: Path, *, move: bool = False, attempt: int | None = None
    ) -> NewPolicy:
        """Store a policy folder, complete or absent; returns what the ledger announces.

        It survives any kill. It survives a power cut once `sync` was called, which checkpoints do. Each ``attempt`` of
        a run has folders of its own, so that a learner that stalled while its run was resumed harms nobody's.
        """
        key = attempt_key(f"runs/{run_id}/policies/{version}", attempt)
        return NewPolicy(version, key, put_folder(self.objects, key, folder, move=move, durable=False))

    def discard(self, policy: NewPolicy) -> None:
        """Remove a stored policy that was not announced."""
        delete_folder(self.objects, policy.object_key)

    def sync(self, run_id: str, version: int) -> None:
        """Have a stored policy on the disk when this returns."""
        policy = self.ledger.policy(run_id, version)
        sync_folder(self.objects, policy.object_key, policy.sha256)

    def fetch(self, run_id: str, version: int) -> Path:
        """A local folder of the policy, every hash checked once per process.

        Raises:
            PolicyGone: retention removed it.
            CorruptFolder: it is not what was announced.
        """
        policy = self.ledger.policy(run_id, version)
        if policy.removed_at is not None:
            raise PolicyGone(
                f"the files of policy version {version} of run {run_id} were removed (asynchrony.keep_policies): "
                "evaluate or export a newer one"
            )
        folder = self._checked.get(policy.object_key)
        if folder is None or not folder.exists():
            folder = fetch_folder(self.objects, policy.object_key, policy.sha256, self._cache)
            self._checked = {key: there for key, there in self._checked.items() if there.exists()}
            self._checked[policy.object_key] = folder
            self._trim_cache(folder)
        return folder

    def prune(self, run_id: str, keep: int, silent_s: float, *, attempt: int | None = None) -> list[int]:
        """Remove the files of versions that nothing needs (see `Ledger.remove_policies`); returns which."""
        removed = self.ledger.remove_policies(run_id, keep, silent_s, attempt=attempt)
        for policy in removed:
            delete_folder(self.objects, policy.object_key)
        return [policy.version for policy in removed]

    def feed(self, run_id: str) -> LedgerPolicies:
        """The versions of one run, as engines follow them."""
        return LedgerPolicies(self, run_id)

    def _trim_cache(self, newest: Path) -> None:
        if newest.parent != self._cache:
            return
        os.utime(newest)
        folders = sorted(self._cache.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders[CACHED_POLICIES:]:
            if time.time() - folder.stat().st_mtime > CACHE_IDLE_S:
                shutil.rmtree(folder, ignore_errors=True)


class LedgerPolicies:
    """The `PolicyFeed` of one run."""

    def __init__(self, store: PolicyStore, run_id: str) -> None:
        """Follow ``run_id``."""
        self._store = store
        self._run_id = run_id

    def newest(self) -> int | None:
        """The newest version that the run's current attempt announced, or None before the first."""
        policy = self._store.ledger.newest_policy(self._run_id, announced=True)
        return None if policy is None else policy.version

    def fetch(self, version: int) -> Path:
        """A local Hugging Face folder whose hashes were checked."""
        return self._store.fetch(self._run_id, version)
