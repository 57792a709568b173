"""What a soak showed: bars that were met or missed, and charts, from the ledger and the soak's own journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select

from benchmarks.soak import charts
from benchmarks.soak.environment import EchoOptions, EchoTasks, planned_tokens
from infra.ledger import Ledger, RequestState, TrajectoryState
from infra.ledger.database import Mode
from infra.ledger.transitions import load_metrics
from infra.models import FailedAttempt, Request, TrajectoryEntry, Update
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.verify import verify
from sao_core.diagnostics import used_by_length
from sao_core.trajectory import Purpose

USED_SPREAD = 0.02
"""Largest distance of a decile's used ÷ issued from the mean, as a share of the mean."""
DEVIATION = 0.05
"""Largest distance of a process's memory from its median, as a share of it, that counts as flat."""
NOT_OURS = ("prefect-server",)
"""Reported, not judged: the server caches its database, which grows by a row a step, up to 80 MB a connection."""
WARM_UP_S = 600.0
"""A process is warm after so long; one that lived twice as long is judged."""
STUCK_S = 120.0
"""A longer time between two updates, while nothing was started again, counts as stuck."""


def report(
    ledger: Ledger, settings: Settings, run_id: str, journal: Iterable[dict[str, Any]], images: Path, bound: int
) -> dict[str, Any]:
    """Judge the run and draw its charts into ``images``; ``bound`` is the largest queue lag in updates."""
    lines = list(journal)
    starts = [line["at"] for line in lines if line.get("event") == "start"]
    kills = [line["at"] for line in lines if line.get("event") == "kill"]
    updates = _updates(ledger, run_id)
    rollouts = Rollouts(ledger, run_id)
    memory = _memory(lines)
    shares = used_by_length(rollouts.lengths, rollouts.used)
    known = [share for share in shares if share is not None]
    mean = sum(rollouts.used) / max(len(rollouts.used), 1)
    spread = max((abs(share - mean) / mean for share in known), default=1.0) if mean else 1.0
    gap_s = _largest_gap(updates, starts, [line["at"] for line in lines if line.get("event") == "end"])
    lag = max((update["lag"] for update in updates if not update["superseded"]), default=0.0)
    verification = verify(ledger, ObjectStore.from_settings(settings), run_id, tracking_uri=settings.tracking_uri)
    deviations = [
        values["largest_deviation"]
        for part, values in memory.items()
        if part not in NOT_OURS and "largest_deviation" in values
    ]
    bars = {
        "used_by_length": spread <= USED_SPREAD,
        "memory_flat": max(deviations) <= DEVIATION if deviations else None,
        "queue_lag": lag <= bound,
        "nothing_stuck": gap_s <= STUCK_S,
        "verified": verification.ok,
    }
    images.mkdir(parents=True, exist_ok=True)
    charts.steps(images / "soak_steps.png", updates, kills, starts)
    charts.memory(images / "soak_memory.png", lines)
    charts.queue(images / "soak_queue.png", updates, bound)
    charts.used(images / "soak_used.png", shares, rollouts.lengths)
    charts.durations(images / "soak_durations.png", rollouts.trained_lengths, rollouts.durations_s)
    surviving = [update for update in updates if not update["superseded"]]
    hours = lines[-1]["soak_s"] / 3600 if lines else 0.0
    return {
        "benchmark": "soak",
        "ok": all(met is not False for met in bars.values()),
        "bars": bars,
        "hours": round(hours, 2),
        "updates": len(surviving),
        "updates_undone": len(updates) - len(surviving),
        "updates_per_s": round(len(surviving) / max(hours * 3600, 1.0), 3),
        "kills": len(kills),
        "starts": len(starts),
        "requests": rollouts.issued,
        "requests_open_or_later": rollouts.issued - len(rollouts.used),
        "parts_open_max": max((line.get("parts", 0) for line in lines), default=0),
        "failed_attempts": rollouts.failed_attempts,
        "used_mean": round(mean, 5),
        "used_by_length": [None if share is None else round(share, 4) for share in shares],
        "used_spread": round(spread, 5),
        "planned_tokens": [min(rollouts.lengths, default=0), max(rollouts.lengths, default=0)],
        "recorded_tokens_max": rollouts.max_tokens,
        "queue_lag_max": round(lag, 2),
        "queue_lag_bound": bound,
        "largest_gap_s": round(gap_s, 1),
        "memory": memory,
        "reward_first_last": _rewards(surviving),
        "violations": [f"{v.rule} {v.subject}: {v.detail}" for v in verification.violations[:20]],
        "orphans": len(verification.orphans),
        "skipped": dict(verification.skipped),
    }


class Rollouts:
    """What became of the training requests, up to the oldest one that is still open.

    Everything before that one is settled, however long it took; what was issued later is left out, since the short
    rollouts among them are done and the long ones are not.
    """

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        tasks = EchoTasks(EchoOptions(), seed=0)
        mine = (Request.run_id == run_id, Request.purpose == Purpose.TRAIN)
        joined = (TrajectoryEntry.run_id == run_id, TrajectoryEntry.segment == 0)
        columns = (Request.number, Request.prompt_key, Request.state, Request.issued_at)
        made = (TrajectoryEntry.request_number, TrajectoryEntry.state, TrajectoryEntry.recorded_at)
        failed = select(FailedAttempt.request_number).where(FailedAttempt.run_id == run_id)

        def read(connection: Any) -> tuple[Any, ...]:
            return (
                connection.execute(select(*columns).where(*mine).order_by(Request.number)).all(),
                connection.execute(select(*made, TrajectoryEntry.num_tokens).where(*joined)).all(),
                len(connection.execute(failed).all()),
            )

        requests, trajectories, self.failed_attempts = ledger.transact(read, Mode.READ)
        waiting = (TrajectoryState.READY, TrajectoryState.CLAIMED)
        held = {number for number, state, *_ in trajectories if state in waiting}
        trained_at = {number: at for number, state, at, _ in trajectories if state == TrajectoryState.TRAINED}
        unfinished = (RequestState.PENDING, RequestState.LEASED)
        still = [number for number, _, state, _ in requests if state in unfinished or number in held]
        self.issued = len(requests)
        self.max_tokens = max((tokens for *_, tokens in trajectories), default=0)
        self.lengths: list[int] = []
        self.used: list[bool] = []
        self.trained_lengths: list[int] = []
        self.durations_s: list[float] = []
        for number, key, _, issued_at in requests:
            if still and number >= still[0]:
                break
            length = planned_tokens(tasks.task(key))
            self.lengths.append(length)
            self.used.append(number in trained_at)
            if number in trained_at:
                self.trained_lengths.append(length)
                self.durations_s.append(trained_at[number] - issued_at)


def _updates(ledger: Ledger, run_id: str) -> list[dict[str, Any]]:
    """Time, step, queue lag and reward of every step that was committed, undone ones included."""
    columns = (Update.step, Update.committed_at, Update.superseded, Update.metrics_json)
    statement = select(*columns).where(Update.run_id == run_id).order_by(Update.update_id)

    def read(connection: Any) -> list[dict[str, Any]]:
        rows = []
        for step, at, superseded, metrics_json in connection.execute(statement):
            metrics = load_metrics(metrics_json)
            lag, reward = metrics.get("staleness/queue", 0.0), metrics.get("reward/mean")
            rows.append({"step": step, "at": at, "superseded": superseded, "lag": lag, "reward": reward})
        return rows

    return ledger.transact(read, Mode.READ)


def _largest_gap(updates: Sequence[dict[str, Any]], starts: Sequence[float], ends: Sequence[float]) -> float:
    """Longest time between two commits, or from a commit to the end, without a new start in between."""
    times = sorted([*(update["at"] for update in updates), *ends])
    return max((b - a for a, b in pairwise(times) if not any(a < start < b for start in starts)), default=0.0)


def _rewards(updates: Sequence[dict[str, Any]], part: int = 100) -> list[float | None]:
    rewards = [update["reward"] for update in updates if update["reward"] is not None]
    ends = (rewards[:part], rewards[-part:])
    return [round(float(np.mean(end)), 3) if end else None for end in ends]


def _memory(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median of every part's process that lived longest, and what it grew by in an hour once it was warm."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for process, memory_mb in line.get("memory", {}).items():
            series.setdefault(process, []).append((line["at"], memory_mb))
    longest: dict[str, tuple[float, str]] = {}
    for process, points in series.items():
        part = process.partition("/")[0]
        longest[part] = max(longest.get(part, (0.0, "")), (points[-1][0] - points[0][0], process))
    result = {}
    for part, (lived_s, process) in sorted(longest.items()):
        points = series[process]
        warm = np.array([point for point in points if point[0] - points[0][0] >= WARM_UP_S])
        values = {"lived_s": round(lived_s), "median_mb": round(float(np.median([mb for _, mb in points])), 1)}
        if lived_s >= 2 * WARM_UP_S:
            per_hour = float(np.polyfit((warm[:, 0] - warm[0, 0]) / 3600, warm[:, 1], 1)[0])
            middle = float(np.median(warm[:, 1]))
            values |= {
                "median_mb": round(middle, 1),
                "mb_per_h": round(per_hour, 1),
                "largest_deviation": round(float(np.max(np.abs(warm[:, 1] - middle)) / middle), 4),
            }
        result[part] = values
    return result
