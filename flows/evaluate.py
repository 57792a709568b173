"""Evaluation alone: a model folder on the held-out prompts of an environment, sampled and greedy."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.supervision import supervised
from sao_core.config import TrainConfig
from tasks.evaluate import finish_evaluations, request_evaluation
from tasks.prepare import prepare_policy
from tasks.report import report


@flow(name="evaluate")
def evaluate(config: TrainConfig, run_id: str | None = None) -> State:
    """Evaluate `model.path` as it is; every answer is stored like a trajectory.

    Args:
        config: The model and the tasks; of the rest, what concerns rollouts and evaluation.
        run_id: A name for the run; leave it empty for one by recipe and time.
    """
    as_it_is = config.warm_start.model_copy(update={"enabled": False})
    return prepare_and_evaluate(config.model_copy(update={"warm_start": as_it_is}), run_id)


def prepare_and_evaluate(config: TrainConfig, run_id: str | None = None) -> State:
    """Publish the policy that ``config`` starts from as version 0 of the run, and evaluate it; nothing is updated."""
    with supervised(config, run_id) as supervision:
        run = supervision.run
        prepare_policy(run)
        request_evaluation(run, 0)
        finish_evaluations(run)
        report(run)
    return supervision.final_state()
