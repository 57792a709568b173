"""What each of two ranks runs in `test_ranks.py`; a module of its own so that a spawned process can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from learner_fixtures import make_batch, make_config, random_rollouts

from sao_core.learner import Learner
from sao_core.parallel import init_distributed

STAGES = (0, 1, 2, 3)
ROLLOUTS = 5


def one_step(folder: Path, stage: int) -> dict[str, Any]:
    """One value and policy update with learning rates of 1 step; every figure that must not depend on the ranks."""
    config = make_config(learner={"zero_stage": stage, "micro_batch_tokens": 64}, algorithm={"truncation": "bootstrap"})
    learner = Learner(config, folder, seed=0, device="cpu")
    batch = make_batch(random_rollouts(ROLLOUTS))
    metrics = learner.update_value(batch, {1: 0}) | learner.update_policy()
    return {
        "metrics": metrics,
        "critic": learner.critic.engine.state_dict(),
        "policy": learner.policy.engine.state_dict(),
    }


def main(rank: int, folder: str) -> None:
    """Join the other rank through a file, make a step per stage, and leave rank 0's figures behind."""
    torch.set_num_threads(1)
    init_distributed(torch.device("cpu"), rank, 2, f"file://{folder}/rendezvous")
    results = {stage: one_step(Path(folder) / "policy", stage) for stage in STAGES}
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
