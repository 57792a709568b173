"""The model of an evaluation that stands alone: published as version 0 of its run by the evaluator, without a learner.

Stored like any policy, so that its sha256 is on the record and its answers can be made again.
"""

from __future__ import annotations

import hashlib
import shutil
from fnmatch import fnmatch
from pathlib import Path

from infra.ledger import Ledger
from infra.manifest import MANIFEST, describe, manifest_bytes
from infra.policy_store import PolicyStore
from sao_core.models.folder import CRITIC_FOLDER
from sao_core.models.tiny import build_tiny

NO_PART_OF_A_POLICY = (CRITIC_FOLDER, MANIFEST, ".*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx")
"""What model folders hold beyond a policy: it is neither stored nor hashed."""


def model_sha256(folder: Path) -> str:
    """The sha256 that the model of a folder has once it is published."""

    def belongs(path: str) -> bool:
        return not any(fnmatch(part, pattern) for part in path.split("/") for pattern in NO_PART_OF_A_POLICY)

    entries = [entry for entry in describe(folder) if belongs(entry.path)]
    return hashlib.sha256(manifest_bytes(entries)).hexdigest()


def publish_model(
    ledger: Ledger, policies: PolicyStore, run_id: str, attempt: int, model: str, seed: int, scratch: Path
) -> None:
    """Announce the model in folder ``model`` (`tiny`: built from nothing) for this attempt of the run, once.

    A resumed attempt announces what the first one stored; a restarted process finds it announced.
    """
    if ledger.newest_policy(run_id, announced=True) is not None:
        return
    stored = ledger.newest_policy(run_id)
    if stored is not None:
        ledger.announce(run_id, stored.version, attempt=attempt)
        return
    folder = scratch / run_id / "model"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    if model == "tiny":
        build_tiny(folder, seed=seed)
    else:
        shutil.copytree(Path(model).expanduser(), folder, ignore=shutil.ignore_patterns(*NO_PART_OF_A_POLICY))
    policy = policies.put(run_id, 0, folder, move=True, attempt=attempt)
    ledger.add_policy(run_id, policy, step=0, attempt=attempt)
    shutil.rmtree(scratch / run_id, ignore_errors=True)
