"""Evaluations in MLflow: points on the training run, and a child run of their own."""

from __future__ import annotations

from typing import Any

from infra.ledger import EvaluationRecord
from infra.tracking.client import Destination, find_run, milliseconds, points

EVALUATION_TAG = "sao.evaluation"


def send_evaluation(
    there: Destination, run_id: str, evaluation: EvaluationRecord, before: list[EvaluationRecord], tasks: Any
) -> str:
    """Send the result of an evaluation; returns its child run. ``tasks``: what it was made on, as MLflow's input.

    A step has one point on the training run: what was shown of it ``before``, and undone since by a rewind, stands.
    """
    shown = {key for e in before if (e.step, e.suite) == (evaluation.step, evaluation.suite) for key in e.metrics}
    new = {key: value for key, value in evaluation.metrics.items() if key not in shown}
    if new:
        some = points(new, step=evaluation.step, at=evaluation.created_at)
        there.client.log_batch(there.run_id, metrics=some, synchronous=True)
    child = _child(there, run_id, evaluation)
    some = points(evaluation.metrics, step=evaluation.step, at=evaluation.created_at)
    there.client.log_batch(child, metrics=some, synchronous=True)
    there.client.log_inputs(child, datasets=[tasks])
    there.client.set_terminated(child, "FINISHED", milliseconds(evaluation.created_at))
    return child


def find_child(there: Destination, run_id: str, evaluation: EvaluationRecord) -> str | None:
    """The MLflow run of an evaluation, if it was sent."""
    found = find_run(there.client, there.experiment_id, EVALUATION_TAG, _key(run_id, evaluation))
    return None if found is None else str(found.info.run_id)


def settings_tags(evaluation: EvaluationRecord) -> dict[str, str]:
    """What an evaluation was made with, as tags: its weights, and every setting that is one value."""
    plain = {name: value for name, value in evaluation.settings.items() if isinstance(value, str | int | float)}
    target_run = str(plain.get("target", "")).removeprefix("run:").rpartition("@")[0]
    tags = {name: str(value) for name, value in plain.items()} | {"policy_sha256": evaluation.policy_sha256}
    return tags | ({"target_run": target_run} if target_run else {})


def _child(there: Destination, run_id: str, evaluation: EvaluationRecord) -> str:
    """Find or make the run of an evaluation."""
    found = find_child(there, run_id, evaluation)
    if found is not None:
        return found
    tags = {
        EVALUATION_TAG: _key(run_id, evaluation),
        "mlflow.parentRunId": there.run_id,
        "suite": evaluation.suite,
        "step": str(evaluation.step),
        "policy_version": str(evaluation.version),
        **settings_tags(evaluation),
    }
    at, name = milliseconds(evaluation.created_at), f"{evaluation.suite} at step {evaluation.step}"
    return str(there.client.create_run(there.experiment_id, at, tags, name).info.run_id)


def _key(run_id: str, evaluation: EvaluationRecord) -> str:
    return f"{run_id}/{evaluation.suite}/{evaluation.version}"
