"""Supervised start alone: demonstrations, or a user's JSONL of `messages` → a policy to start training from."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from flows.evaluate import prepare_and_evaluate
from sao_core.config import TrainConfig


@flow(name="warm-start")
def warm_start(config: TrainConfig, run_id: str | None = None) -> State:
    """Train the policy on demonstrations, publish it as version 0 of the run, and evaluate it.

    Args:
        config: The model, the tasks and the warm start.
        run_id: A name for the run; leave it empty for one by recipe and time.
    """
    enabled = config.warm_start.model_copy(update={"enabled": True})
    return prepare_and_evaluate(config.model_copy(update={"warm_start": enabled}), run_id)
