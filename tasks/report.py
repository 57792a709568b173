"""The end of a run, as a page in the Prefect UI; training never depends on it."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infra.ledger import EvaluationRecord, Ledger, TrajectoryRow
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.training_run import TrainingRun
from infra.trajectory_store import TrajectoryStore
from sao_core.trajectory import Trajectory

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
MOST_CHARACTERS = 4000
"""Of one trajectory; the viewer shows all of it."""
MOST_EVALUATIONS = 6
"""In the table: the first one and the newest; MLflow shows all of them."""


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def report(run: TrainingRun) -> str:
    """Markdown of how the run went; shown in the UI if its server answers within seconds."""
    text = run_report(run.ledger, run.settings, run.run_id)

    def show() -> None:
        try:
            create_markdown_artifact(markdown=text, key="training-report", description="evaluations and rollouts")
        except Exception as error:  # the server may be gone: what is reported stands in the ledger all the same
            logger.warning("the report could not be shown in the Prefect UI: %s", error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(show,), name="report", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return text


def run_report(ledger: Ledger, settings: Settings, run_id: str) -> str:
    """Evaluations side by side; the best, the worst and a typical rollout of the last one; where everything is."""
    evaluations = ledger.evaluations(run_id)
    parts = [f"# {run_id}", evaluations_markdown(evaluations)]
    if evaluations:
        notable = ledger.notable_rollouts(run_id, evaluations[-1].version, 1)
        samples = {
            "A typical rollout": [notable.typical] if notable.typical else [],
            "The best": notable.best,
            "The worst": notable.worst,
        }
        store = TrajectoryStore(ObjectStore.from_settings(settings))
        parts += [
            trajectory_markdown(heading, row, store.read([row])[0][0])
            for heading, rows in samples.items()
            for row in rows
            if row.num_segments == 1
        ]
    parts.append(
        f"Trajectories: `{settings.object_store}/runs/{run_id}/trajectories`. Where the time went, and the settings: "
        f"`sao show {run_id}`."
    )
    return "\n\n".join(part for part in parts if part)


def evaluations_markdown(evaluations: Sequence[EvaluationRecord]) -> str:
    """A table with a row for each metric and a column for each evaluation, `MOST_EVALUATIONS` at most."""
    if not evaluations:
        return ""
    shown = [*evaluations[:1], *evaluations[1:][1 - MOST_EVALUATIONS :]]
    names = sorted({name for e in shown for name in e.metrics})
    head = "| metric | " + " | ".join(f"step {e.step}" for e in shown) + " |"
    rule = "|---|" + "---:|" * len(shown)
    rows = [
        f"| {plain(name)} | " + " | ".join(f"{e.metrics[name]:.3f}" if name in e.metrics else "–" for e in shown) + " |"
        for name in names
    ]
    return "\n".join([head, rule, *rows])


def trajectory_markdown(heading: str, row: TrajectoryRow, trajectory: Trajectory) -> str:
    """A rollout as a conversation."""
    text = "\n\n".join(f"{message.role}: {message.content.strip()}" for message in trajectory.messages)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]} …"
    return (
        f"## {heading}: reward {row.score:g}\n\n{row.outcome}, {row.num_turns} turn{'s' * (row.num_turns != 1)}, "
        f"{row.num_action_tokens} tokens sampled. Token by token: `sao trajectory {row.trajectory_id} --html`\n\n"
        f"{fenced(text)}"
    )


def plain(text: str) -> str:
    """Text as part of a Markdown line in which nothing of it is markup: no tag, no link, no end of a cell."""
    return re.sub(r"[^\w /.,:+-]", lambda character: f"&#{ord(character.group())};", text)


def fenced(text: str) -> str:
    """Text as a Markdown code block that it cannot leave, whatever it contains."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
