"""Evaluations of a run: ask for one, and turn its finished rollouts into one result per policy version.

The evaluator process makes the rollouts; the flow only looks whether they are all there, and never waits in training.
What is asked for stands in the ledger, so a resumed run finishes what an earlier attempt began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import comb
from statistics import fmean

from infra.ledger import Ledger, RequestState, TrajectoryRow
from infra.prompts import PromptIssuer
from sao_core.trajectory import Purpose

FINAL = {RequestState.DONE, RequestState.EXHAUSTED, RequestState.CANCELLED}


class EvaluationDesk:
    """Keeps the evaluations of one run."""

    def __init__(self, ledger: Ledger, run_id: str, suite: str) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._suite = suite

    def request(self, issuer: PromptIssuer) -> None:
        """Ask for an evaluation of the newest policy, once per version."""
        policy = self._ledger.newest_policy(self._run_id)
        if policy is not None and not self._ledger.request_states(self._run_id, Purpose.EVALUATE, policy.version):
            issuer.evaluation(policy.version)

    def collect(self) -> int:
        """Write down the results that are complete; returns how many evaluations are still running."""
        running = 0
        for version in self._ledger.unreported_evaluations(self._run_id):
            states = self._ledger.request_states(self._run_id, Purpose.EVALUATE, version)
            if set(states) <= FINAL:
                self._report(version, missing=sum(n for state, n in states.items() if state is not RequestState.DONE))
            else:
                running += 1
        return running

    def _report(self, version: int, missing: int) -> None:
        policy = self._ledger.policy(self._run_id, version)
        rows = self._ledger.evaluation_rows(self._run_id, version)
        metrics = evaluation_metrics(self._suite, rows)
        metrics[f"eval/{self._suite}/missing_rollouts"] = float(missing)
        self._ledger.add_evaluation(self._run_id, policy.step, version, self._suite, metrics, policy.sha256)


def evaluation_metrics(suite: str, rows: Sequence[TrajectoryRow]) -> dict[str, float]:
    """Mean rewards (sampled and greedy; in all and by difficulty), pass@k, truncation and tokens of an evaluation.

    Rows may hold several segments per rollout; each carries the rollout's score, so only the first counts.
    """
    prefix = f"eval/{suite}/"
    rollouts = [row for row in rows if row.segment == 0]
    groups: dict[str, list[TrajectoryRow]] = defaultdict(list)
    for row in rollouts:
        name = "greedy_reward_mean" if row.greedy else "reward_mean"
        groups[name].append(row)
        if row.difficulty:
            groups[f"difficulty_{row.difficulty}/{name}"].append(row)
    metrics = {prefix + name: fmean(row.score for row in members) for name, members in groups.items()}
    sampled = groups.get("reward_mean", [])
    if sampled:
        metrics[f"{prefix}truncated"] = fmean(row.outcome == "truncated" for row in sampled)
        metrics[f"{prefix}tokens"] = fmean(row.num_action_tokens for row in sampled)
        metrics |= {f"{prefix}pass_at_{k}": value for k, value in pass_at_k(sampled).items()}
    return metrics


def pass_at_k(rows: Sequence[TrajectoryRow]) -> dict[int, float]:
    """Unbiased pass@k (Chen et al. 2021) for k = 2, 4, 8 … up to the samples per prompt; solved means score ≥ 1.

    1 − C(n−c, k) / C(n, k) for n samples of a prompt with c solved, averaged over prompts.
    """
    prompts: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        prompts[row.prompt_key].append(row.score >= 1.0)
    samples = min(len(solved) for solved in prompts.values())
    return {
        k: fmean(1.0 - comb(len(s) - sum(s), k) / comb(len(s), k) for s in prompts.values())
        for k in (2**i for i in range(1, 10))
        if k <= samples
    }
