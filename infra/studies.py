"""What a study found: the last evaluation of each run, as mean and 95 % interval over the seeds of a variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.ledger import Ledger, RunStatus
from infra.tracking.comparison import Mean


@dataclass(frozen=True)
class StudyRow:
    """One variant by one metric."""

    variant: str
    metric: str
    runs: int
    """Completed ones; others do not count."""
    mean: float | None
    half_width: float | None
    """Of the 95 % interval (Student's t over seeds); None with fewer than two runs."""

    def as_dict(self) -> dict[str, Any]:
        """For a table."""
        mean = "–" if self.mean is None else f"{self.mean:.3f}"
        spread = "" if self.half_width is None else f" ± {self.half_width:.3f}"
        return {"variant": self.variant, "metric": self.metric, "runs": self.runs, "mean ± 95 %": mean + spread}


def compare(ledger: Ledger, variants: Mapping[str, Sequence[str]]) -> list[StudyRow]:
    """Sampled and greedy reward of every variant (name → run ids), in the last evaluation of its completed runs."""
    rows = []
    for variant, run_ids in variants.items():
        finals = [
            evaluations[-1]
            for run_id in run_ids
            if ledger.has_run(run_id)
            and ledger.run(run_id).status is RunStatus.COMPLETED
            and (evaluations := ledger.evaluations(run_id))
        ]
        for name in ("reward_mean", "greedy_reward_mean"):
            values = [value for e in finals if (value := e.metrics.get(f"eval/{e.suite}/{name}")) is not None]
            rows.append(StudyRow(variant, name, len(values), *_interval(values)))
    return rows


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    mean = Mean.of(values)
    return mean.value, mean.high - mean.value if len(values) > 1 else None
