"""The figures of one evaluation, from what the ledger says of its rollouts; no file is read.

A rollout may have several segments, each of which carries the whole score; tokens and turns are summed over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from infra.ledger import TrajectoryRow
from sao_core.statistics import Interval, avg_at_k, bootstrap_interval, pass_at_k, prompt_means
from sao_core.trajectory import Outcome

SOLVED = 1.0
"""A rollout with at least this score has solved its prompt."""


@dataclass(frozen=True)
class EvaluatedRollout:
    """One rollout of an evaluation."""

    request_number: int
    prompt_key: str
    difficulty: str
    greedy: bool
    score: float
    truncated: bool
    tokens: int
    """That the policy sampled."""
    turns: int
    duration_s: float | None
    """None in rows that an earlier version recorded."""

    @property
    def solved(self) -> bool:
        """Whether it counts for pass@k."""
        return self.score >= SOLVED


def evaluated_rollouts(rows: Sequence[TrajectoryRow]) -> list[EvaluatedRollout]:
    """The rollouts that ``rows`` (segments) make up, by request number."""
    segments: dict[int, list[TrajectoryRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.request_number, row.segment)):
        segments[row.request_number].append(row)
    return [_rollout(members) for members in segments.values()]


def scores_by_prompt(rollouts: Sequence[EvaluatedRollout]) -> dict[str, list[float]]:
    """Prompt → the scores of its rollouts, in the order in which they were asked for."""
    scores: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        scores[rollout.prompt_key].append(rollout.score)
    return dict(scores)


def evaluation_metrics(suite: str, rows: Sequence[TrajectoryRow]) -> dict[str, float]:
    """``eval/SUITE/…``: mean rewards (sampled and greedy, in all and by difficulty), avg@k, pass@k, truncation, costs.

    A mean weighs every prompt the same. ``…_low`` and ``…_high`` are the ends of its 95 % interval by bootstrap over
    prompts (:mod:`sao_core.statistics`), left out for a single prompt.
    """
    rollouts = evaluated_rollouts(rows)
    metrics: dict[str, float] = {}
    for name, greedy in (("reward_mean", False), ("greedy_reward_mean", True)):
        members = [rollout for rollout in rollouts if rollout.greedy is greedy]
        metrics |= _mean(name, members)
        for difficulty in sorted({rollout.difficulty for rollout in members} - {""}):
            metrics |= _mean(f"difficulty_{difficulty}/{name}", [r for r in members if r.difficulty == difficulty])
    sampled = [rollout for rollout in rollouts if not rollout.greedy]
    if sampled:
        metrics |= _at_k(sampled)
        metrics["truncated"] = fmean(rollout.truncated for rollout in sampled)
        metrics["tokens"] = fmean(rollout.tokens for rollout in sampled)
        metrics["turns"] = fmean(rollout.turns for rollout in sampled)
        seconds = [rollout.duration_s for rollout in sampled if rollout.duration_s is not None]
        if seconds:
            metrics["rollout_s"] = fmean(seconds)
    return {f"eval/{suite}/{name}": value for name, value in metrics.items()}


def interval_of(metrics: Mapping[str, float], name: str) -> Interval | None:
    """The interval of a metric, if it has one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return None if low is None or high is None else Interval(low, high)


def _mean(name: str, members: Sequence[EvaluatedRollout]) -> dict[str, float]:
    if not members:
        return {}
    scores = list(scores_by_prompt(members).values())
    return {name: avg_at_k(scores), **_ends(name, bootstrap_interval(prompt_means(scores)))}


def _at_k(sampled: Sequence[EvaluatedRollout]) -> dict[str, float]:
    """avg@k of all samples; pass@k for k = 1, 2, 4, 8 … and all, up to the fewest samples that a prompt has."""
    prompts: dict[str, list[bool]] = defaultdict(list)
    for rollout in sampled:
        prompts[rollout.prompt_key].append(rollout.solved)
    samples = min(len(solved) for solved in prompts.values())
    found: dict[str, float] = {}
    if samples > 1:
        found[f"avg_at_{samples}"] = avg_at_k(list(scores_by_prompt(sampled).values()))
    for k in sorted({2**i for i in range(samples.bit_length())} | {samples}):
        values = [pass_at_k(len(solved), sum(solved), k) for solved in prompts.values()]
        name = f"pass_at_{k}"
        found |= {name: fmean(values), **_ends(name, bootstrap_interval(values))}
    return found


def _ends(name: str, interval: Interval | None) -> dict[str, float]:
    return {} if interval is None else {f"{name}_low": interval.low, f"{name}_high": interval.high}


def _rollout(segments: Sequence[TrajectoryRow]) -> EvaluatedRollout:
    first = segments[0]
    return EvaluatedRollout(
        request_number=first.request_number,
        prompt_key=first.prompt_key,
        difficulty=first.difficulty,
        greedy=first.greedy,
        score=first.score,
        truncated=first.outcome is Outcome.TRUNCATED,
        tokens=sum(row.num_action_tokens for row in segments),
        turns=sum(row.num_turns for row in segments),
        duration_s=first.duration_s,
    )
