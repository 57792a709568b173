"""Evaluation: asked for and collected here, done by the evaluator process, never waited for while training."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="request evaluation", task_run_name="request evaluation of step {step}", cache_policy=NO_CACHE)
def request_evaluation(run: TrainingRun, step: int) -> None:
    """Ask for an evaluation of the newest policy; a step is evaluated once."""
    run.evaluations.request(run.issuer)


@task(name="finish evaluations", task_run_name="finish evaluations", cache_policy=NO_CACHE)
def finish_evaluations(run: TrainingRun) -> None:
    """Wait for the evaluations that are still running."""
    run.wait(lambda: run.evaluations.collect() == 0, "waiting for the evaluations to end")
