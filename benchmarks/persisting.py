"""Making trajectories durable (object, then row): speed, size, share of the rollout loop, memory. JSON lines.

`writing`: trajectories and tokens per second until they are recorded, on SQLite with a folder and on Postgres with S3,
for short and long trajectories, against JSONL with an fsync per flush and against the bare arrays as npz.
`loop`: the share of a real rollout loop (tiny model, one thread) that goes into it. `memory`: what a worker's resident
memory grows by while it records 10,000 trajectories.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from given.rollouts import LEASE_S, issued, new_run, trajectory
from given.services import Place, places

from infra.ledger import Ledger, NewPolicy
from infra.objects import ObjectStore
from infra.policy_store import PolicyStore
from infra.requests import LedgerRequests
from infra.trajectory_store import TrajectoryStore, TrajectoryWriter
from sao_core.config import parse_config
from sao_core.environments import base as environments
from sao_core.protocols import Rollout
from sao_core.trajectory import ARRAY_FIELDS, Purpose, Trajectory

TRAIN = (Purpose.TRAIN,)
WORKER = "worker"
RAW_BYTES_PER_TOKEN = 17
"""token id, mask, log-probability, version and reward as plain arrays."""


def leased(ledger: Ledger, run_id: str, count: int, num_tokens: int, random: np.random.Generator) -> list[Rollout]:
    """Finished rollouts of ``count`` requests that the worker holds."""
    issued(ledger, run_id, count)
    requests = ledger.lease(run_id, WORKER, TRAIN, count, LEASE_S)
    return [(trajectory(request, num_tokens, random),) for request in requests]


def writing(place: Place, num_tokens: int, count: int, rounds: int) -> dict[str, Any]:
    """Flushes of ``count`` trajectories, each timed until it is durable and recorded; medians."""
    ledger = Ledger(place.database_url)
    objects = ObjectStore(place.object_store, endpoint_url=place.endpoint_url)
    store = TrajectoryStore(objects)
    run_id = new_run(ledger)
    random = np.random.default_rng(0)
    writer = TrajectoryWriter(ledger, store, run_id, WORKER, flush_interval_s=60.0)
    seconds: dict[str, list[float]] = {"durable": [], "read": [], "jsonl": [], "npz": []}
    exact = True
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, f"trajectories.{name}") for name in ("jsonl", "npz")}
        for _ in range(rounds + 1):
            rollouts = leased(ledger, run_id, count, num_tokens, random)
            before = ledger.trajectories(run_id)
            seconds["durable"].append(timed(lambda batch=rollouts: put_all(writer, batch)))
            rows = ledger.trajectories(run_id)[len(before) :]
            started = time.perf_counter()
            stored = store.read(rows)
            seconds["read"].append(time.perf_counter() - started)
            seconds["jsonl"].append(timed(lambda batch=rollouts: append_jsonl(files["jsonl"], batch)))
            seconds["npz"].append(timed(lambda batch=rollouts: write_npz(files["npz"], batch)))
            exact = exact and all(same(a[0], b[0]) for a, b in zip(rollouts, stored, strict=True))
        writer.close()
        tokens = num_tokens * count
        jsonl_bytes = files["jsonl"].stat().st_size / (rounds + 1)
    size = sum(objects.size(key) for key in objects.keys(f"runs/{run_id}/trajectories")) / (rounds + 1)
    ledger.close()
    took = {name: median(values[1:]) for name, values in seconds.items()}  # the first round connects and compiles
    return {
        "benchmark": "persisting",
        "part": "writing",
        "place": place.name,
        "tokens_per_trajectory": num_tokens,
        "trajectories_per_flush": count,
        "trajectories_per_s": round(count / took["durable"], 1),
        "tokens_per_s": round(tokens / took["durable"]),
        "read_tokens_per_s": round(tokens / took["read"]),
        "jsonl_tokens_per_s": round(tokens / took["jsonl"]),
        "npz_tokens_per_s": round(tokens / took["npz"]),
        "speed_over_jsonl": round(took["jsonl"] / took["durable"], 2),
        "bytes_per_token": round(size / tokens, 2),
        "jsonl_bytes_per_token": round(jsonl_bytes / tokens, 2),
        "raw_bytes_per_token": RAW_BYTES_PER_TOKEN,
        "exact": exact,
    }


def put_all(writer: TrajectoryWriter, rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        writer.put(rollout)
    writer.flush(wait=True)


def append_jsonl(path: Path, rollouts: Sequence[Rollout]) -> None:
    """The same content as text: a line per trajectory, on the disk when it returns."""
    with open(path, "a") as file:
        for rollout in rollouts:
            for segment in rollout:
                values = dataclasses.asdict(segment)
                values |= {name: getattr(segment, name).tolist() for name in ARRAY_FIELDS}
                file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_npz(path: Path, rollouts: Sequence[Rollout]) -> None:
    """The arrays alone, uncompressed."""
    with open(path, "wb") as file:
        arrays = {name: np.concatenate([getattr(rollout[0], name) for rollout in rollouts]) for name in ARRAY_FIELDS}
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def same(a: Trajectory, b: Trajectory) -> bool:
    """Equal to the last bit."""
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ARRAY_FIELDS)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memory(folder: Path, count: int, num_tokens: int = 300, per_flush: int = 50) -> dict[str, Any]:
    """Resident memory of this process while one writer records ``count`` trajectories."""
    ledger = Ledger(f"sqlite:///{folder}/memory.db")
    run_id = new_run(ledger)
    writer = TrajectoryWriter(ledger, TrajectoryStore(ObjectStore(str(folder / "memory"))), run_id, WORKER)
    random = np.random.default_rng(0)
    process = psutil.Process()
    resident: list[float] = []
    for _ in range(count // per_flush):
        put_all(writer, leased(ledger, run_id, per_flush, num_tokens, random))
        resident.append(process.memory_info().rss / 2**20)
    writer.close()
    ledger.close()
    tenth = max(1, len(resident) // 10)
    first, last = median(resident[tenth : 2 * tenth]), median(resident[-tenth:])
    return {
        "benchmark": "persisting",
        "part": "memory",
        "trajectories": writer.recorded,
        "tokens_per_trajectory": num_tokens,
        "mb_after_a_tenth": round(first, 1),
        "mb_at_the_end": round(last, 1),
        "growth_mb": round(last - first, 1),
    }


class TimedWriter(TrajectoryWriter):
    """Counts what persisting costs: time that the loop spends in calls, and processor time of both threads."""

    calls_s = 0.0
    cpu_s = 0.0

    def put(self, rollout: Rollout) -> None:
        """As the base class."""
        with self._in_a_call():
            super().put(rollout)

    def flush(self, wait: bool = False) -> None:
        """As the base class."""
        with nullcontext() if wait else self._in_a_call():
            super().flush(wait)

    @contextmanager
    def _in_a_call(self) -> Iterator[None]:
        started, cpu = time.perf_counter(), time.thread_time()
        yield
        self.calls_s += time.perf_counter() - started
        self.cpu_s += time.thread_time() - cpu

    def _store_batch(self, batch: list[Rollout]) -> None:
        started = time.thread_time()
        super()._store_batch(batch)
        self.cpu_s += time.thread_time() - started


def loop(place: Place, folder: Path, rollouts: int) -> dict[str, Any]:
    """A rollout worker's loop over ``rollouts`` requests of the calculator environment."""
    import torch

    from sao_core.models.tiny import build_tiny
    from sao_core.rollout.worker import run_worker

    torch.set_num_threads(1)
    config = parse_config(
        {"rollout": {"slots": 64, "max_turns": 6, "max_action_tokens": 64, "max_context_tokens": 192}}
    )
    ledger = Ledger(place.database_url)
    objects = ObjectStore(place.object_store, endpoint_url=place.endpoint_url)
    run_id = new_run(ledger)
    build_tiny(folder / "tiny", seed=0)
    policies = PolicyStore(objects, ledger, folder / "cache")
    stored = policies.put(run_id, 1, folder / "tiny")
    ledger.add_policy(run_id, NewPolicy(stored.version, stored.object_key, stored.sha256), step=0, parent_version=0)
    issued(ledger, run_id, rollouts)
    environment = environments.get("calculator")
    tasks = environment.tasks(environment.parse_options({}), config.seed)
    requests = LedgerRequests(ledger, run_id, WORKER, TRAIN, config.rollout.lease_s)
    writer = TimedWriter(ledger, TrajectoryStore(objects), run_id, WORKER)
    cpu = time.process_time()
    done = rollouts - config.rollout.slots  # until the slots begin to run empty
    stats = run_worker(
        config, requests, writer, policies.feed(run_id), environment, tasks, lambda: writer.recorded >= done
    )
    cpu_s = time.process_time() - cpu
    writer.close()
    ledger.close()
    return {
        "benchmark": "persisting",
        "part": "loop",
        "place": place.name,
        "rollouts": writer.recorded,
        "tokens_per_s": round(stats.tokens_per_s),
        "share_in_calls": round(writer.calls_s / stats.elapsed_s, 4),
        "share_of_processor_time": round(writer.cpu_s / cpu_s, 4),
        "loop_s": round(stats.elapsed_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=10_000, help="for the memory of a worker")
    parser.add_argument("--rollouts", type=int, default=1500, help="of the rollout loop")
    arguments = parser.parse_args()

    def show(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    with tempfile.TemporaryDirectory() as scratch, places() as both:
        folder = Path(scratch)
        show(memory(folder, arguments.trajectories))
        for place in both:
            for num_tokens, count in ((100, 64), (100_000, 4)):
                show(writing(place, num_tokens, count, arguments.rounds))
        for place in both:
            show(loop(place, folder / place.name, arguments.rollouts))


if __name__ == "__main__":
    main()
