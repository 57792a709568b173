"""Bytes per token and seconds of storing trajectories as Parquet objects in a folder: one JSON line per length."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from infra.objects import ObjectStore
from infra.trajectory_store import TrajectoryStore
from sao_core.trajectory import Outcome, Purpose, Trajectory

ROUNDS = 5
RAW_BYTES_PER_TOKEN = 17
"""token id, mask, log-probability, version and reward as plain arrays."""


def trajectory(number: int, num_tokens: int, rng: np.random.Generator) -> Trajectory:
    """Turns of 100 sampled and 20 inserted tokens, with log-probabilities as random as real ones."""
    mask = np.arange(num_tokens) % 120 < 100
    mask[-1] = True
    rewards = np.zeros(num_tokens, np.float32)
    rewards[-1] = 1.0
    return Trajectory(
        trajectory_id=f"bench-{number}",
        run_id="bench",
        request_number=number,
        attempt=1,
        purpose=Purpose.TRAIN,
        prompt_key=str(number),
        token_ids=(rng.zipf(1.3, num_tokens) % 50_000).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(0.5, num_tokens), 0).astype(np.float32),
        policy_versions=np.where(mask, np.arange(num_tokens) // 5000, -1).astype(np.int32),
        rewards=rewards,
        score=1.0,
        outcome=Outcome.COMPLETED,
        stop_reason="answered",
    )


def main() -> None:
    for num_tokens, count in ((100, 64), (100_000, 1)):
        rng = np.random.default_rng(0)
        rollouts = [(trajectory(i, num_tokens, rng),) for i in range(count)]
        puts, reads = [], []
        with tempfile.TemporaryDirectory() as folder:
            objects = ObjectStore(folder)
            store = TrajectoryStore(objects)
            for round_number in range(ROUNDS):
                started = time.perf_counter()
                rows = store.write(f"bench/{round_number}.parquet", rollouts)
                puts.append(time.perf_counter() - started)
                started = time.perf_counter()
                stored = store.read(rows)
                reads.append(time.perf_counter() - started)
            size = Path(folder, "bench/0.parquet").stat().st_size
        exact = all(
            np.array_equal(a[0].behavior_logprobs.view(np.int32), b[0].behavior_logprobs.view(np.int32))
            for a, b in zip(rollouts, stored, strict=True)
        )
        line = {
            "benchmark": "storage",
            "tokens_per_trajectory": num_tokens,
            "trajectories_per_object": count,
            "bytes_per_token": round(size / (num_tokens * count), 2),
            "raw_bytes_per_token": RAW_BYTES_PER_TOKEN,
            "logprobs_bit_exact": exact,
            "put_tokens_per_s": round(num_tokens * count / median(puts)),
            "read_tokens_per_s": round(num_tokens * count / median(reads)),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
