"""Supervised start alone: demonstrations, or a user's JSONL of `messages` → a policy to start training from."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.supervision import supervised
from sao_core.config import TrainConfig
from tasks.evaluate import finish_evaluations, request_evaluation
from tasks.prepare import prepare_policy
from tasks.report import report


@flow(name="warm-start", flow_run_name="warm start {run_id}")
def warm_start(config: TrainConfig, run_id: str) -> State:
    """Train the policy on demonstrations, publish it as version 0 of the run, and evaluate it."""
    enabled = config.warm_start.model_copy(update={"enabled": True})
    with supervised(config.model_copy(update={"warm_start": enabled}), run_id) as supervision:
        run = supervision.run
        prepare_policy(run)
        request_evaluation(run, 0)
        finish_evaluations(run)
        report(run)
    return supervision.final_state()
