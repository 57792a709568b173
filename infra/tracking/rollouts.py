"""The best and the worst rollouts of an evaluation, as traces and as pages of the trajectory viewer."""

from __future__ import annotations

import logging

from infra.ledger import EvaluationRecord, Ledger, LedgerError, TrajectoryRow
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.tracking.artifacts import put_artifact
from infra.tracking.client import Destination, is_refusal
from infra.tracking.traces import send_trace
from infra.trajectory_store import TrajectoryStore

logger = logging.getLogger("infra.tracking")


class NotableRollouts:
    """Sends the notable rollouts of a run's evaluations; one that cannot be shown is left out, with a warning."""

    def __init__(self, ledger: Ledger, settings: Settings, run_id: str, count: int) -> None:
        """``count`` of the best and as many of the worst sampled ones; 0 sends none."""
        self._ledger = ledger
        self._settings = settings
        self._run_id = run_id
        self._count = count

    def send(self, there: Destination, evaluation: EvaluationRecord, child: str, model_id: str | None) -> None:
        """Send those of one evaluation; ``child`` is its MLflow run, ``model_id`` the logged model of its policy."""
        ranked = self._ranked(evaluation.version)
        segments = [row for _, first in ranked for row in self._ledger.rollout(first)]
        intact, damaged = TrajectoryStore(ObjectStore.from_settings(self._settings)).read_intact(segments)
        rollouts = {rollout[0].request_number: rollout for rollout in intact}
        for problem in damaged.values():
            logger.warning("not shown in MLflow: %s", problem)
        sent: list[str] = []
        without_page: dict[str, str] = {}
        for rank, row in ranked:
            if row.request_number not in rollouts:
                continue
            try:
                sent.append(send_trace(there, rollouts[row.request_number], rank, evaluation, model_id))
            except Exception as error:
                if not is_refusal(error):
                    raise
                logger.warning("MLflow refused %s as a trace: %s", row.trajectory_id, error)
            try:
                page = self._page(row)
            except LedgerError:
                raise
            except Exception as error:  # whatever is wrong with one rollout must not hold up the others
                without_page[f"{type(error).__name__}: {error}"] = row.trajectory_id
            else:
                put_artifact(there, self._settings, f"trajectories/{evaluation.step}/{rank}.html", page.encode())
        for reason, example in without_page.items():
            logger.warning("rollouts of step %d have no page in MLflow (%s): %s", evaluation.step, example, reason)
        if sent:
            there.client.link_traces_to_run(sent, child)

    def _ranked(self, version: int) -> list[tuple[str, TrajectoryRow]]:
        if self._count == 0:
            return []
        notable = self._ledger.notable_rollouts(self._run_id, version, self._count)
        return [
            *((f"best-{place}", row) for place, row in enumerate(notable.best, 1)),
            *((f"worst-{place}", row) for place, row in enumerate(notable.worst, 1)),
        ]

    def _page(self, row: TrajectoryRow) -> str:
        from infra.viewer import trajectory_page, trajectory_view

        return trajectory_page(trajectory_view(self._ledger, self._settings, row.trajectory_id))
