"""Evaluation: asked for and collected here, done by the evaluator process, never waited for while training."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.training_run import TrainingRun


@task(name="publish model", task_run_name="publish model", cache_policy=NO_CACHE)
def wait_for_model(run: TrainingRun) -> None:
    """Wait until the evaluator has stored and announced the model."""
    run.wait(lambda: run.ledger.newest_policy(run.run_id, announced=True) is not None, "publishing the model")


@task(name="request evaluation", task_run_name="request evaluation of step {step}", cache_policy=NO_CACHE)
def request_evaluation(run: TrainingRun, step: int) -> None:
    """Ask for an evaluation of the newest policy; a step is evaluated once."""
    run.evaluations.request(run.issuer)


@task(name="finish evaluations", task_run_name="finish evaluations", cache_policy=NO_CACHE)
def finish_evaluations(run: TrainingRun) -> None:
    """Wait for the evaluations that are still running."""
    run.wait(lambda: run.evaluations.collect() == 0, "waiting for the evaluations to end")
