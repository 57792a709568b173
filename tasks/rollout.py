"""The processes that make rollouts, each as a task run that lasts as long as its process may be needed."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.attempts import EVALUATOR
from infra.training_run import TrainingRun


@task(name="rollout worker", task_run_name="rollout worker {index}", cache_policy=NO_CACHE)
def rollout_worker(run: TrainingRun, index: int) -> None:
    """Last until the run has closed; fails with the worker's traceback if that is what ended the run."""
    run.watch(f"rollout-{index}")


@task(name="evaluator", task_run_name="evaluator", cache_policy=NO_CACHE)
def evaluator(run: TrainingRun) -> None:
    """As :func:`rollout_worker`, for the process that makes the evaluations' rollouts."""
    run.watch(EVALUATOR)
