"""Evaluations of a run: ask for one, and turn its finished rollouts into one result per policy version.

The evaluator process makes the rollouts; the flow only looks whether they are all there, and never waits in training.
What is asked for stands in the ledger, so a resumed run finishes what an earlier attempt began. Each result carries
what it was made with, so that two are compared only where they can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.evaluation_metrics import evaluation_metrics
from infra.ledger import Ledger, PolicyRecord, RequestState, TrajectoryRow
from infra.manifest import file_sha256
from infra.prompts import PromptIssuer
from infra.tracking.description import code_version
from sao_core.config import TrainConfig
from sao_core.trajectory import Purpose

FINAL = {RequestState.DONE, RequestState.EXHAUSTED, RequestState.CANCELLED}
LIMITS = ("max_turns", "max_action_tokens", "max_context_tokens", "step_timeout_s", "rollout_timeout_s")
"""Settings of `rollout` that decide what an answer may cost, and so how good it can be."""


class EvaluationDesk:
    """Keeps the evaluations of one run."""

    def __init__(self, ledger: Ledger, run_id: str, config: TrainConfig) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._config = config

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
        suite = self._config.suite
        policy = self._ledger.policy(self._run_id, version)
        rows = self._ledger.evaluation_rows(self._run_id, version)
        metrics = evaluation_metrics(suite, rows)
        metrics[f"eval/{suite}/missing_rollouts"] = float(missing)
        prompts = self._ledger.prompts_evaluated(self._run_id, version)
        settings = evaluation_settings(self._config, policy, rows, prompts)
        self._ledger.add_evaluation(self._run_id, policy.step, version, suite, metrics, policy.sha256, settings)


def evaluation_settings(
    config: TrainConfig, policy: PolicyRecord, rows: Sequence[TrajectoryRow], prompts: int
) -> dict[str, Any]:
    """What an evaluation was made with, as JSON values: the tasks, the sampling, the weights, the code.

    ``prompts``: how many were asked for. A resume may bring other code, so there may be several environment versions.
    """
    evaluation = config.evaluation
    versions = sorted({row.environment_version for row in rows if row.environment_version is not None})
    return {
        "suite": config.suite,
        "environment": config.environment.name,
        "environment_options": dict(config.environment.options),
        "environment_version": " | ".join(versions) or None,
        "files": {name: file_sha256(path) for name, path in _files(config).items()},
        "seed": config.seed,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "top_k": evaluation.top_k,
        "greedy": evaluation.greedy,
        "prompts": prompts,
        "samples_per_prompt": evaluation.samples_per_prompt,
        "limits": {name: getattr(config.rollout, name) for name in LIMITS},
        "dtype": config.model.dtype,
        "target": config.model.path if evaluation.alone else f"{policy.run_id}@{policy.step}",
        "policy_sha256": policy.sha256,
        "code": code_of_evaluation(),
    }


def _files(config: TrainConfig) -> dict[str, Path]:
    """Options of the environment that name a file: its questions may change while its name does not."""
    texts = {name: value for name, value in config.environment.options.items() if isinstance(value, str)}
    paths = {name: Path(value).expanduser() for name, value in texts.items() if name.endswith("path")}
    return {name: path for name, path in paths.items() if path.is_file()}


def code_of_evaluation() -> dict[str, str | None]:
    """Which code evaluates: the version of this package, the working directory's commit, and whether it is changed."""
    code = code_version()
    return {"version": code["sao.version"], "commit": code["mlflow.source.git.commit"], "dirty": code["git.dirty"]}
