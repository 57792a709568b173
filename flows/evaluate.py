"""Evaluation alone: a model's answers to held-out prompts. The learner is not started; the evaluator has the model."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.supervision import supervised
from sao_core.config import TrainConfig
from tasks.evaluate import finish_evaluations, request_evaluation, wait_for_model
from tasks.prepare import prepare_policy
from tasks.report import report


@flow(name="evaluate")
def evaluate(config: TrainConfig, run_id: str | None = None) -> State:
    """Evaluate `model.path` as it is; every answer is stored like a trajectory.

    Args:
        config: The model (a folder, `tiny`, `models:/NAME@champion` or `run:RUN@STEP`) and the tasks; of the rest, what
            concerns rollouts and evaluation.
        run_id: A name for the run; leave it empty for one by recipe and time.
    """
    alone = {
        "evaluation": config.evaluation.model_copy(update={"alone": True}),
        "warm_start": config.warm_start.model_copy(update={"enabled": False}),
    }
    with supervised(config.model_copy(update=alone), run_id, training=False) as supervision:
        run = supervision.run
        wait_for_model(run)
        request_evaluation(run, 0)
        finish_evaluations(run)
        report(run)
    return supervision.final_state()


def prepare_and_evaluate(config: TrainConfig, run_id: str | None = None) -> State:
    """Publish the policy that ``config`` starts from as version 0 of the run, and evaluate it; nothing is updated."""
    with supervised(config, run_id) as supervision:
        run = supervision.run
        prepare_policy(run)
        request_evaluation(run, 0)
        finish_evaluations(run)
        report(run)
    return supervision.final_state()
