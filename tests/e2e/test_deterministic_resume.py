"""In deterministic mode a run that was killed and resumed ends with the very weights of one that never stopped.

Synchronous, one slot, one thread: then a rollout depends on the seed, its request and its attempt alone.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest
from short_run import FASTEST, Home

UPDATES = 6
DETERMINISTIC = (
    *FASTEST,
    f"learner.updates={UPDATES}",
    "learner.checkpoint_every=3",
    "learner.threads=1",
    "asynchrony.enabled=false",
    "rollout.workers=1",
    "rollout.slots=1",
    "rollout.threads=1",
    "environment.options.tool_latency_mean_s=0",
    "evaluation.every=0",
    "tracking.enabled=false",
)


def weights(home: Home, run_id: str) -> dict[str, str]:
    """sha256 of policy and critic in the run's last checkpoint."""
    ledger = home.ledger()
    checkpoint = ledger.latest_checkpoint(run_id)
    assert checkpoint is not None
    assert checkpoint.step == UPDATES
    folder = Path(home.settings.object_store) / checkpoint.object_key
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.safetensors")}
    assert len(files) >= 2, "policy and critic"
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def learned(home: Home, run_id: str) -> list[tuple[float, ...]]:
    """What each step saw and did, in numbers that differ if anything does."""
    names = ("reward/mean", "policy/loss", "policy/grad_norm", "value/loss", "rollout/tokens_total")
    return [tuple(update.metrics[name] for name in names) for update in home.ledger().updates_since(run_id, 0)]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_killed_and_resumed_run_ends_with_the_weights_of_an_uninterrupted_one_bit_for_bit(
    home: Home, finished: dict[str, str]
):
    assert home.sao("export", finished["run_id"], "beginning").returncode == 0
    settings = (*DETERMINISTIC, f"model.path={home.folder / 'beginning'}")
    process = home.train(*settings)
    whole_run = home.wait_for_step(process, 1)
    assert process.wait(200) == 0, process.communicate()

    process = home.train(*settings)
    killed_run = home.wait_for_step(process, 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = home.sao("train", "--resume", killed_run)
    assert done.returncode == 0, done.stdout + done.stderr

    assert home.ledger().superseded_steps(killed_run), "steps after the checkpoint were done again"
    assert learned(home, killed_run) == learned(home, whole_run)
    assert weights(home, killed_run) == weights(home, whole_run)
