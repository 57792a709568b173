"""The end of a run, as a page in the Prefect UI; training never depends on it."""

from __future__ import annotations

import contextvars
import logging
import threading

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infra.ledger import EvaluationRecord
from infra.training_run import TrainingRun

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0


@task(name="report", cache_policy=NO_CACHE)
def report(run: TrainingRun) -> str:
    """Markdown of how the run went; shown in the UI if its server answers within seconds."""
    text = report_markdown(run.run_id, run.ledger.evaluations(run.run_id), run.settings.object_store)

    def show() -> None:
        try:
            create_markdown_artifact(markdown=text, key="training-report", description=run.run_id)
        except Exception as error:  # the server may be gone: the report is in the ledger all the same
            logger.warning("the report could not be shown in the Prefect UI: %s", error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(show,), name="report", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return text


def report_markdown(run_id: str, evaluations: list[EvaluationRecord], object_store: str) -> str:
    """Evaluations side by side, and where the trajectories are."""
    names = sorted({name for e in evaluations for name in e.metrics})
    head = "| metric | " + " | ".join(f"step {e.step}" for e in evaluations) + " |"
    rule = "|---|" + "---|" * len(evaluations)
    rows = [
        f"| {name} | " + " | ".join(f"{e.metrics[name]:.3f}" if name in e.metrics else "–" for e in evaluations) + " |"
        for name in names
    ]
    return "\n".join(
        [f"# {run_id}", "", head, rule, *rows, "", f"Trajectories: `{object_store}/runs/{run_id}/trajectories`"]
    )
