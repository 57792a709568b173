"""Two evaluations of the same tasks against each other: which model is better, and how sure that is.

Compared prompt by prompt, on the prompts that both have an answer to; refused where the two were asked otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infra.evaluation_metrics import evaluated_rollouts, scores_by_prompt
from infra.ledger import EvaluationRecord, Ledger
from sao_core.config import ConfigError
from sao_core.statistics import Interval, PairedTest, bootstrap_interval, paired_test, prompt_means

MUST_AGREE = (
    *("suite", "environment", "environment_version", "environment_options", "files", "seed"),
    *("temperature", "top_p", "top_k", "samples_per_prompt", "limits"),
)
"""Settings under which answers are worth the same and the sign of a difference is chance, if the models are alike. (An
unequal number of samples would make the two means vary unequally.)"""
VERSION = "environment_version"
"""Of an evaluation without any answer it is not known."""


@dataclass(frozen=True)
class Evaluated:
    """One result, and the run that it belongs to."""

    run_id: str
    record: EvaluationRecord

    @property
    def label(self) -> str:
        """How people name it."""
        return self.run_id if self.record.step == 0 else f"{self.run_id}@{self.record.step}"


@dataclass(frozen=True)
class Side:
    """One of two models, over the prompts that both have."""

    label: str
    target: str
    policy_sha256: str
    mean: float
    interval: Interval | None
    missing: int
    """Prompts that only the other one has an answer to, or that neither has though this one was asked."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "evaluation": self.label,
            "target": self.target,
            "policy_sha256": self.policy_sha256,
            "reward_mean": self.mean,
            "interval": None if self.interval is None else [self.interval.low, self.interval.high],
            "missing_prompts": self.missing,
        }


@dataclass(frozen=True)
class EvaluationComparison:
    """Mean sampled reward of two models on the same prompts; differences are first minus second."""

    suite: str
    first: Side
    second: Side
    test: PairedTest

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        interval = self.test.interval
        return {
            "suite": self.suite,
            "first": self.first.as_dict(),
            "second": self.second.as_dict(),
            "difference": self.test.difference,
            "interval": None if interval is None else [interval.low, interval.high],
            "p_value": self.test.p_value,
            "prompts": self.test.prompts,
            "test": f"paired sign-flip permutation, two-sided, {'exact' if self.test.exact else 'sampled'}",
        }


def find_evaluation(ledger: Ledger, name: str) -> Evaluated:
    """The result that ``RUN`` (its newest) or ``RUN@STEP`` stands for.

    Raises:
        UnknownRun: there is no such run.
        ConfigError: it has no such result; the message lists what there is.
    """
    run_id, at, step = name.rpartition("@")
    if not at or not step.isdigit():
        run_id, step = name, ""
    ledger.run(run_id)
    records = ledger.evaluations(run_id)
    found = [record for record in records if step in ("", str(record.step))]
    if not found:
        steps = ", ".join(str(record.step) for record in records)
        there = f"there are those of steps {steps}" if records else "it has none yet"
        raise ConfigError(f"run {run_id} has no evaluation{f' of step {step}' if step else ''}; {there}")
    return Evaluated(run_id, found[-1])


def compare(ledger: Ledger, first: Evaluated, second: Evaluated) -> EvaluationComparison:
    """Compare two results by the sampled rewards of the prompts that both have.

    Raises:
        ConfigError: they were asked otherwise, which is named, or have no prompt in common.
    """
    _require_alike(first, second)
    ours, theirs = _scores(ledger, first), _scores(ledger, second)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ConfigError(f"{first.label} and {second.label} have no prompt in common that both have an answer to")
    a, b = prompt_means([ours[key] for key in common]), prompt_means([theirs[key] for key in common])
    seed = int(first.record.settings["seed"])
    everything = max(first.record.settings["prompts"], second.record.settings["prompts"])
    return EvaluationComparison(
        first.record.suite,
        _side(first, a, everything - len(ours), seed),
        _side(second, b, everything - len(theirs), seed),
        paired_test(a, b, seed=seed),
    )


def _require_alike(first: Evaluated, second: Evaluated) -> None:
    for one in (first, second):
        if not one.record.settings:
            raise ConfigError(
                f"{one.label} was made by an earlier version, which recorded no settings: evaluate it again"
            )
    ours, theirs = first.record.settings, second.record.settings
    known = [name for name in MUST_AGREE if name != VERSION or None not in (ours[name], theirs[name])]
    differing = [f"{name} {ours[name]} against {theirs[name]}" for name in known if ours[name] != theirs[name]]
    if differing:
        raise ConfigError(
            f"{first.label} and {second.label} cannot be compared, since they differ in {'; '.join(differing)}: "
            "evaluate one of them again as the other was"
        )


def _scores(ledger: Ledger, one: Evaluated) -> dict[str, list[float]]:
    rollouts = evaluated_rollouts(ledger.evaluation_rows(one.run_id, one.record.version))
    return scores_by_prompt([rollout for rollout in rollouts if not rollout.greedy])


def _side(one: Evaluated, means: Sequence[float] | Any, missing: int, seed: int) -> Side:
    return Side(
        label=one.label,
        target=str(one.record.settings["target"]),
        policy_sha256=one.record.policy_sha256,
        mean=float(sum(means) / len(means)),
        interval=bootstrap_interval(means, seed=seed),
        missing=missing,
    )
