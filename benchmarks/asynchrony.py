"""Asynchronous against synchronous training: trajectories per second of the update loop, same machine, same run.

A short run makes the starting model; then each way trains from it in turn, several times. Synchronous runs take the
better of 1 and 2 threads. One JSON line per tool latency, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from infra.ledger import Ledger
from infra.settings import Settings

SKIPPED_STEPS = 3
"""The first steps find a queue that filled while the learner was starting."""


def sao(home: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments], cwd=home, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])


def train(home: Path, updates: int, *settings: str) -> dict[str, float]:
    """One run; medians of its steps, and trajectories per second over all but the first."""
    common = (
        f"learner.updates={updates}",
        "evaluation.every=0",
        "evaluation.prompts=1",
        "tracking.enabled=true",
        "learner.checkpoint_every=1000000",
    )
    sao(home, "train", "tiny", *(part for value in (*common, *settings) for part in ("--set", value)))
    ledger = Ledger(Settings.from_environment({}, directory=home).database_url)
    run = ledger.runs(1)[0]
    rows = ledger.updates_since(run.run_id, SKIPPED_STEPS)
    seconds = rows[-1].committed_at - rows[0].committed_at
    names = ("time/step_s", "time/learner_wait_s", "time/orchestration_s", "time/store_s", "staleness/mean")
    return {
        "trajectories_per_s": sum(r.num_trajectories for r in rows[1:]) / seconds,
        **{name: median(r.metrics[name] for r in rows) for name in names},
    }


def compare(home: Path, model: Path, latency_s: float, updates: int, rounds: int) -> dict[str, Any]:
    start = (
        f"model.path={model}",
        "warm_start.enabled=false",
        "policy.first_update_step=1",
        f"environment.options.tool_latency_mean_s={latency_s}",
    )
    ways = {
        "asynchronous": (),
        "synchronous_1_thread": ("asynchrony.enabled=false", "learner.threads=1", "rollout.threads=1"),
        "synchronous_2_threads": ("asynchrony.enabled=false", "learner.threads=2", "rollout.threads=2"),
    }
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, settings in ways.items():
            results[way].append(train(home, updates, *start, *settings))
    medians = {
        way: {name: round(median(run[name] for run in runs), 4) for name in runs[0]} for way, runs in results.items()
    }
    synchronous = max(medians[way]["trajectories_per_s"] for way in ways if way != "asynchronous")
    return {
        "benchmark": "asynchrony",
        "tool_latency_mean_s": latency_s,
        "slots": 64,
        "updates": updates,
        "rounds": rounds,
        "speedup": round(medians["asynchronous"]["trajectories_per_s"] / synchronous, 3),
        **medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 0.3])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        train(home, SKIPPED_STEPS + 2)
        run = Ledger(Settings.from_environment({}, directory=home).database_url).runs(1)[0]
        model = home / "model"
        sao(home, "export", run.run_id, str(model))
        for latency_s in arguments.latencies:
            print(json.dumps(compare(home, model, latency_s, arguments.updates, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
