"""Promotion: which version of a model is its champion, who may become it, and the way back.

A candidate passes the gate with an evaluation of exactly its policy that is not worse than the champion's on the same
suite. The registered model keeps the line of champions in a tag, so that the one before can be set again.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infra.checkpoints import find_checkpoint
from infra.ledger import EvaluationRecord, Ledger, LedgerError
from infra.refusals import without_password
from infra.settings import Settings
from infra.tracking.client import TrackingError, explain, is_absent, open_client
from infra.tracking.comparison import Comparison, Mean, compare
from infra.tracking.registry import CHAMPION, Registered, checkpoint_policy, model_name, register, version_at
from sao_core.config import ConfigError

CHAMPIONS_TAG = "sao.champions"
"""On the registered model: the versions that were champions, oldest first, as JSON."""


class PromotionRefused(RuntimeError):
    """The gate is closed; the message has the numbers and the way out."""


@dataclass(frozen=True)
class Promotion:
    """What was promoted, and why it may be."""

    version: Registered
    suite: str | None
    reward: Mean | None
    before: Registered | None
    """The champion before."""
    comparison: Comparison | None
    overridden: tuple[str, ...]
    """What spoke against it."""

    def __str__(self) -> str:
        measured = self.comparison or (f"{self.suite} reward {self.reward}" if self.reward else "not evaluated")
        lines = [f"{self.version} is the {CHAMPION} now: {measured}"]
        if self.before is not None and self.before != self.version:
            lines.append(f"before it was {self.before}; back to that: sao rollback {self.version.name}")
        lines += [f"overridden by --force: {reason}" for reason in self.overridden]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.version.name,
            "version": self.version.number,
            "run_id": self.version.run_id,
            "step": self.version.step,
            "policy_version": self.version.policy_version,
            "policy_sha256": self.version.policy_sha256,
            "uri": f"models:/{self.version.name}@{CHAMPION}",
            "suite": self.suite,
            "reward": None if self.reward is None else self.reward.as_dict(),
            "champion_before": None if self.before is None else self.before.number,
            "difference": None if self.comparison is None else self.comparison.difference.as_dict(),
            "paired": None if self.comparison is None else self.comparison.paired,
            "overridden": list(self.overridden),
        }


@dataclass(frozen=True)
class Rollback:
    """Which champion was put back, and which one stood down."""

    now: Registered
    before: Registered

    def __str__(self) -> str:
        return f"{self.now} is the {CHAMPION} again, in place of version {self.before.number}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.now.name,
            "version": self.now.number,
            "run_id": self.now.run_id,
            "step": self.now.step,
            "champion_before": self.before.number,
        }


def promote(
    ledger: Ledger,
    settings: Settings,
    run_id: str,
    *,
    checkpoint: str | None = None,
    at_least: float | None = None,
    force: bool = False,
) -> Promotion:
    """Make the policy of a run's checkpoint (a name or step; None: the newest) the champion of its recipe's model.

    Raises:
        UnknownRun: there is no such run.
        ConfigError: there is no such checkpoint.
        PromotionRefused: the gate is closed, and there was no ``force``.
        TrackingError: MLflow does not answer, or does not know the run.
    """
    run = ledger.run(run_id)
    if checkpoint is None and not ledger.checkpoints(run_id):
        raise ConfigError(f"run {run_id} has no checkpoint yet: train it further, then promote")
    record = find_checkpoint(ledger, run_id, checkpoint)
    if run.mlflow_run_id is None:
        raise TrackingError(f"run {run_id} is not in MLflow yet: sao sync {run_id}")
    policy = checkpoint_policy(ledger, run_id, record.step)
    try:
        client = open_client(settings.tracking_uri)
        name = model_name(run.recipe)
        champion = version_at(client, name, f"@{CHAMPION}")
        evaluation = _evaluation(ledger, run_id, policy.sha256)
        reward = None if evaluation is None else Mean.of(list(_scores(ledger, run_id, evaluation.version).values()))
        comparison, against = _judge(ledger, run_id, record.step, evaluation, reward, champion, at_least)
        if against and not force:
            raise PromotionRefused(f"{run_id} is not promoted: {'; '.join(against)}; or override with --force")
        version = register(client, ledger, settings, run, record)
        _promote(client, version, reward, champion)
    except (ConfigError, LedgerError, PromotionRefused, TrackingError):
        raise
    except Exception as error:  # of MLflow, SQLAlchemy or requests: each means that it cannot be asked
        where = without_password(settings.tracking_uri)
        raise TrackingError(f"MLflow at {where}: {explain(error, settings.tracking_uri)}") from error
    suite = None if evaluation is None else evaluation.suite
    return Promotion(version, suite, reward, champion, comparison, tuple(against))


def rollback(settings: Settings, name: str | None = None) -> Rollback:
    """Make the champion before the champion again; ``name`` may be left out if only one model has a champion.

    Raises:
        ConfigError: there is no such model, or it is not clear which.
        PromotionRefused: there was no champion before.
        TrackingError: MLflow does not answer.
    """
    try:
        client = open_client(settings.tracking_uri)
        name = name or _only_model(client, settings)
        champion = version_at(client, name, f"@{CHAMPION}")
        if champion is None:
            raise ConfigError(f"the model {name} has no {CHAMPION}; promote a run first: sao promote RUN")
        line = _line(client, name, champion.number)
        if len(line) < 2:
            raise PromotionRefused(f"{champion} is the first {CHAMPION} of {name}: there is none before it")
        now = version_at(client, name, str(line[-2]))
        if now is None:
            raise PromotionRefused(
                f"version {line[-2]}, the {CHAMPION} of {name} before, was deleted: promote another run"
            )
        # The tag first: what a kill leaves undone in between is taken up from the alias the next time.
        client.set_registered_model_tag(name, CHAMPIONS_TAG, json.dumps(line[:-1]))
        client.set_registered_model_alias(name, CHAMPION, str(now.number))
        client.set_model_version_tag(name, str(champion.number), "sao.rolled_back_at", _now())
    except (ConfigError, PromotionRefused, TrackingError):
        raise
    except Exception as error:  # as above
        where = without_password(settings.tracking_uri)
        raise TrackingError(f"MLflow at {where}: {explain(error, settings.tracking_uri)}") from error
    return Rollback(now, champion)


def _judge(
    ledger: Ledger,
    run_id: str,
    step: int,
    evaluation: EvaluationRecord | None,
    reward: Mean | None,
    champion: Registered | None,
    at_least: float | None,
) -> tuple[Comparison | None, list[str]]:
    """How the candidate compares, and what speaks against it."""
    if evaluation is None or reward is None:
        others = _evaluated_checkpoints(ledger, run_id)
        instead = f" (evaluated ones: --checkpoint {', '.join(map(str, others))})" if others else ""
        return None, [f"the policy of step {step} was not evaluated{instead}"]
    against: list[str] = []
    if at_least is not None and reward.value < at_least:
        against.append(f"its {evaluation.suite} reward {reward} is below --at-least {at_least:g}")
    if champion is None or champion.policy_sha256 == evaluation.policy_sha256:
        return None, against
    try:
        comparison = _compare_with(ledger, run_id, evaluation, champion)
    except ValueError as reason:
        return None, [*against, str(reason)]
    if comparison.difference.value < 0:
        noise = ", which may be chance" if comparison.difference.high >= 0 else ""
        against.append(f"it is worse than {champion}: {comparison}{noise}")
    return comparison, against


def _compare_with(ledger: Ledger, run_id: str, evaluation: EvaluationRecord, champion: Registered) -> Comparison:
    """Raises ValueError, with the reason, if the two cannot be compared."""
    try:
        ours, theirs = ledger.run(run_id).config, ledger.run(champion.run_id).config
    except LedgerError as error:
        raise ValueError(f"it cannot be compared with {champion}: {error}") from error
    held = _evaluation(ledger, champion.run_id, champion.policy_sha256)
    if held is None or held.suite != evaluation.suite:
        suites = f"on {held.suite}, not {evaluation.suite}" if held is not None else "never"
        raise ValueError(f"it cannot be compared with {champion}, which was evaluated {suites}")
    if ours["environment"] != theirs["environment"]:
        raise ValueError(f"it cannot be compared with {champion}, whose tasks were others (environment.options)")
    return compare(
        _scores(ledger, run_id, evaluation.version),
        _scores(ledger, champion.run_id, held.version),
        evaluation.suite,
        same_prompts=ours["seed"] == theirs["seed"],  # the held-out prompts follow from options and seed
    )


def _evaluation(ledger: Ledger, run_id: str, sha256: str) -> EvaluationRecord | None:
    """The newest evaluation of exactly this policy that has sampled rollouts."""
    found = [e for e in ledger.evaluations(run_id) if e.policy_sha256 == sha256]
    return next((e for e in reversed(found) if _scores(ledger, run_id, e.version)), None)


def _evaluated_checkpoints(ledger: Ledger, run_id: str) -> list[int]:
    known = {evaluation.policy_sha256 for evaluation in ledger.evaluations(run_id)}
    steps = [record.step for record in ledger.checkpoints(run_id)]
    return [step for step in steps if checkpoint_policy(ledger, run_id, step).sha256 in known]


def _scores(ledger: Ledger, run_id: str, version: int) -> dict[str, float]:
    """The mean sampled reward of each prompt of an evaluation."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in ledger.evaluation_rows(run_id, version):
        if row.segment == 0 and not row.greedy:
            scores[row.prompt_key].append(row.score)
    return {key: fmean(values) for key, values in scores.items()}


def _promote(client: Any, version: Registered, reward: Mean | None, champion: Registered | None) -> None:
    if champion is not None and champion.number == version.number:
        return
    line = _line(client, version.name, None if champion is None else champion.number)
    client.set_registered_model_alias(version.name, CHAMPION, str(version.number))
    # After the alias: what a kill leaves out here is taken up from the alias the next time.
    client.set_registered_model_tag(version.name, CHAMPIONS_TAG, json.dumps([*line, version.number]))
    tags = {"sao.promoted_at": _now(), "sao.reward": "not evaluated" if reward is None else str(reward)}
    for key, value in tags.items():
        client.set_model_version_tag(version.name, str(version.number), key, value)


def _line(client: Any, name: str, champion: int | None) -> list[int]:
    """The champions of a model, oldest first, the present one last."""
    try:
        tags = client.get_registered_model(name).tags
    except Exception as error:
        if is_absent(error):
            return []
        raise
    line = [int(number) for number in json.loads(tags.get(CHAMPIONS_TAG, "[]"))]
    return line if champion is None or line[-1:] == [champion] else [*line, champion]


def _only_model(client: Any, settings: Settings) -> str:
    with_champion = [model.name for model in client.search_registered_models() if CHAMPION in model.aliases]
    if len(with_champion) != 1:
        where = without_password(settings.tracking_uri)
        if not with_champion:
            raise ConfigError(f"no model in MLflow at {where} has a {CHAMPION}; promote a run first: sao promote RUN")
        raise ConfigError(f"name the model to roll back; a {CHAMPION} have: {', '.join(with_champion)}")
    return str(with_champion[0])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
