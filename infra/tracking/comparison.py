"""Two policies on the same tasks: mean rewards with intervals, and the difference between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval; Student's t over prompts, whose samples are averaged first."""

    value: float
    low: float
    high: float
    prompts: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of one value per prompt; a single one has no bounds."""
        from scipy.special import stdtrit

        mean = fmean(values)
        if len(values) < 2:
            return cls(mean, -math.inf, math.inf, len(values))
        half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half, len(values))

    def minus(self, other: Mean) -> Mean:
        """The difference of two independent means (Welch), as far as both have an interval."""
        half = math.hypot(self.high - self.value, other.high - other.value)
        difference = self.value - other.value
        return Mean(difference, difference - half, difference + half, min(self.prompts, other.prompts))

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} … {self.high:.3f})"

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON; an unbounded interval has no bounds."""
        low, high = (bound if math.isfinite(bound) else None for bound in (self.low, self.high))
        return {"mean": self.value, "low": low, "high": high, "prompts": self.prompts}


@dataclass(frozen=True)
class Comparison:
    """A candidate's sampled reward against the champion's on the same suite."""

    suite: str
    candidate: Mean
    champion: Mean
    difference: Mean
    paired: bool
    """Whether both answered the same prompts, so that the difference is taken prompt by prompt."""

    def __str__(self) -> str:
        how = f"on the same {self.difference.prompts} prompts" if self.paired else "on different prompts"
        sign = "+" if self.difference.value >= 0 else ""
        return (
            f"{self.suite} reward {self.candidate} against the champion's {self.champion}: "
            f"{sign}{self.difference} {how}"
        )


def compare(
    candidate: Mapping[str, float], champion: Mapping[str, float], suite: str, *, same_prompts: bool
) -> Comparison:
    """Compare mean rewards by prompt; paired where both answered the same prompts (two at least)."""
    common = sorted(candidate.keys() & champion.keys()) if same_prompts else []
    if len(common) > 1:
        ours, theirs = [candidate[key] for key in common], [champion[key] for key in common]
        difference = Mean.of([a - b for a, b in zip(ours, theirs, strict=True)])
        return Comparison(suite, Mean.of(ours), Mean.of(theirs), difference, paired=True)
    ours_mean, theirs_mean = Mean.of(list(candidate.values())), Mean.of(list(champion.values()))
    return Comparison(suite, ours_mean, theirs_mean, ours_mean.minus(theirs_mean), paired=False)
