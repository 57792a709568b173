"""A run explains itself on its page in the Prefect UI: progress, links and tables as artifacts.

Everything is read from the ledger by a thread of its own. The run never waits for it, and never fails by it: the
server may be slow, or gone.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.beside import Beside
from flows.display import evaluation_rows, headline
from flows.evaluation_view import rollouts_done
from flows.links import places
from flows.views import go_on, is_evaluation
from infra.ledger import EvaluationRecord, Ledger, RunStatus
from infra.settings import Settings
from tasks.report import fenced, plain

logger = logging.getLogger(__name__)

EVERY_S = 3.0

_BEHIND = {
    "trajectories": "every rollout, as Parquet",
    "MLflow run": "metrics, charts, models, traces",
    "logs": "a file per process",
}
"""What is behind a link, in the few words that a card shows."""


class RunPage(Beside):
    """Keeps the artifacts of a run's flow run up to date while the context lasts."""

    def __init__(self, ledger: Ledger, settings: Settings, run_id: str) -> None:
        super().__init__(ledger, run_id)
        self._settings = settings
        self._progress: UUID | None = None
        self._shown = -1
        self._linked: set[str] = set()
        self._evaluation = 0
        self._complained = False

    def _show(self) -> None:
        while True:
            last = self._done.wait(EVERY_S)
            try:
                self._show_news(last)
            except Exception as error:
                if not self._complained:
                    logger.warning("the page in the Prefect UI is behind: %s", str(error).partition("\n")[0])
                self._complained = True
            if last:
                return

    def _show_news(self, last: bool) -> None:
        self._show_progress()
        self._show_links()
        evaluations = self._ledger.evaluations(self._run_id)
        if evaluations and evaluations[-1].number > self._evaluation:
            self._show_evaluations(evaluations)
        if last:
            self._show_lost()
            self._show_failure()

    def _show_progress(self) -> None:
        run = self._ledger.run(self._run_id)
        if is_evaluation(run):
            at, total = rollouts_done(self._ledger, self._run_id)
            what = "rollout"
        else:
            at, total, what = run.step, int(run.config["learner"]["updates"]), "update"
        if at == self._shown:
            return
        update = self._ledger.last_update(self._run_id)
        numbers = headline(update.metrics) if update else {}
        text = " · ".join([f"{what} {at} of {total}", *(f"{name} {value}" for name, value in numbers.items())])
        percent = min(100.0, 100.0 * at / max(1, total))
        if self._progress is None:
            self._progress = _id(create_progress_artifact(key="progress", progress=percent, description=text))
        else:
            update_progress_artifact(artifact_id=self._progress, progress=percent, description=text)
        self._shown = at

    def _show_links(self) -> None:
        for name, address in places(self._settings, self._ledger.run(self._run_id)).items():
            if name in self._linked or name == "Prefect flow run":
                continue
            link = address if "://" in address else f"file://{address}"
            create_link_artifact(link=link, link_text=address, key=_key(name), description=_BEHIND.get(name, name))
            self._linked.add(name)

    def _show_evaluations(self, evaluations: list[EvaluationRecord]) -> None:
        create_table_artifact(
            table=evaluation_table(evaluations),
            key="evaluation",
            description=f"held-out reward, {plain(evaluations[-1].suite)}",
        )
        self._evaluation = evaluations[-1].number

    def _show_lost(self) -> None:
        lost = self._ledger.lost_rollouts(self._run_id)
        if lost:
            table = [{"reason": reason, "rollouts": count} for reason, count in lost.items()]
            create_table_artifact(table=table, key="rejected-rollouts", description="no update used them, by reason")

    def _show_failure(self) -> None:
        run = self._ledger.run(self._run_id)
        if run.status is RunStatus.FAILED:
            place, ways = (
                ("", "or with Retry.")
                if is_evaluation(run)
                else (f" at update {run.step}", "with Retry, or with the deployment `resume`.")
            )
            markdown = (
                f"# {self._run_id} failed{place}\n\n{fenced(run.message)}\n\n"
                f"Logs: `{self._settings.logs(self._run_id)}`\n\n"
                f"Continue with `sao {go_on(run)}`, {ways}"
            )
            create_markdown_artifact(markdown=markdown, key="failure", description="why it failed")


def evaluation_table(evaluations: list[EvaluationRecord]) -> list[dict[str, Any]]:
    """First against last evaluation, a row for all prompts and one for each difficulty."""
    first, last = evaluations[0], evaluations[-1]
    headings = [f"{how}, step {e.step}" for how in ("sampled", "greedy") for e in (first, last)]  # once if both are one
    return [
        {"prompts": label, **{h: None if c is None else round(c, 4) for h, c in zip(headings, cells, strict=True)}}
        for label, cells in evaluation_rows(first, last)
    ]


def _key(name: str) -> str:
    """An artifact's key: lower case, digits and dashes."""
    return name.lower().replace(" ", "-")


def _id(created: Any) -> UUID:
    return created if isinstance(created, UUID) else UUID(str(created))
