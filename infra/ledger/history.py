"""What the ledger knows of trajectories: looked up, read as history, counted. Nothing here changes anything."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, or_, select

from infra.ledger.database import Database, reads
from infra.ledger.records import TRAINING, RequestState, TrajectoryRow, TrajectoryState
from infra.models import FailedAttempt, Request, TrajectoryEntry
from sao_core.trajectory import Outcome, Purpose


class TrajectoryHistory(Database):
    """Read access to trajectories."""

    @reads
    def trajectory(self, connection: Connection, trajectory_id: str) -> TrajectoryRow | None:
        """One trajectory, or None."""
        statement = select(TrajectoryEntry.__table__).where(TrajectoryEntry.trajectory_id == trajectory_id)
        row = connection.execute(statement).one_or_none()
        return None if row is None else trajectory_row(row)

    @reads
    def rollout(self, connection: Connection, segment: TrajectoryRow) -> list[TrajectoryRow]:
        """All segments of the rollout that one of them belongs to, in order."""
        statement = (
            select(TrajectoryEntry.__table__)
            .where(
                TrajectoryEntry.run_id == segment.run_id,
                TrajectoryEntry.request_number == segment.request_number,
                TrajectoryEntry.attempt == segment.attempt,
            )
            .order_by(TrajectoryEntry.segment)
        )
        return [trajectory_row(row) for row in connection.execute(statement)]

    @reads
    def trajectories(
        self,
        connection: Connection,
        run_id: str,
        purpose: Purpose | None = None,
        *,
        version: int | None = None,
        states: Collection[TrajectoryState] | None = None,
        step: int | None = None,
        limit: int | None = None,
    ) -> list[TrajectoryRow]:
        """Trajectories by request number, attempt, segment: of a purpose, a pinned version, states, a trained step."""
        where = [TrajectoryEntry.run_id == run_id]
        if purpose is not None:
            where.append(TrajectoryEntry.purpose == purpose)
        if version is not None:
            where.append(TrajectoryEntry.request_number.in_(pinned(run_id, version)))
        if states is not None:
            where.append(TrajectoryEntry.state.in_(tuple(states)))
        if step is not None:
            where.append(TrajectoryEntry.trained_step == step)
        order = (TrajectoryEntry.request_number, TrajectoryEntry.attempt, TrajectoryEntry.segment)
        statement = select(TrajectoryEntry.__table__).where(*where).order_by(*order).limit(limit)
        return [trajectory_row(row) for row in connection.execute(statement)]

    @reads
    def evaluation_rows(self, connection: Connection, run_id: str, version: int) -> list[TrajectoryRow]:
        """The stored trajectories of a version's evaluation, by request number and segment."""
        statement = (
            select(TrajectoryEntry.__table__)
            .where(
                TrajectoryEntry.run_id == run_id,
                TrajectoryEntry.request_number.in_(pinned(run_id, version)),
                TrajectoryEntry.state == TrajectoryState.KEPT,
            )
            .order_by(TrajectoryEntry.request_number, TrajectoryEntry.segment)
        )
        return [trajectory_row(row) for row in connection.execute(statement)]

    @reads
    def kept(self, connection: Connection, run_id: str, purpose: Purpose) -> list[TrajectoryRow]:
        """The stored trajectories of a purpose that no update consumes, by request number and segment."""
        statement = (
            select(TrajectoryEntry.__table__)
            .where(
                TrajectoryEntry.run_id == run_id,
                TrajectoryEntry.state == TrajectoryState.KEPT,
                TrajectoryEntry.purpose == purpose,
            )
            .order_by(TrajectoryEntry.request_number, TrajectoryEntry.segment)
        )
        return [trajectory_row(row) for row in connection.execute(statement)]

    @reads
    def can_claim(self, connection: Connection, run_id: str, step: int, batch_size: int) -> bool:
        """Whether there are enough ready rollouts for a step, those that it has claimed included; takes no lock."""
        mine = or_(TrajectoryEntry.state == TrajectoryState.READY, TrajectoryEntry.claimed_step == step)
        statement = select(func.count()).where(*made(run_id), mine)
        return connection.execute(statement).scalar_one() >= batch_size

    @reads
    def num_rollouts(
        self,
        connection: Connection,
        run_id: str,
        purpose: Purpose,
        state: TrajectoryState = TrajectoryState.KEPT,
    ) -> int:
        """How many rollouts of a purpose are in a state."""
        statement = select(func.count()).where(
            TrajectoryEntry.run_id == run_id,
            TrajectoryEntry.state == state,
            TrajectoryEntry.purpose == purpose,
            TrajectoryEntry.segment == 0,
        )
        return connection.execute(statement).scalar_one()

    @reads
    def rejected_since(
        self, connection: Connection, run_id: str, since: float, until: float = math.inf
    ) -> dict[str, int]:
        """Attempts that failed or were rejected in (since, until] by the database's clock, by short reason."""
        statement = (
            select(FailedAttempt.reason, func.count())
            .where(FailedAttempt.run_id == run_id, FailedAttempt.failed_at > since, FailedAttempt.failed_at <= until)
            .group_by(FailedAttempt.reason)
        )
        return dict(connection.execute(statement).tuples().all())

    @reads
    def prompt_rewards(
        self, connection: Connection, run_id: str, prompt_keys: Iterable[str], last: int
    ) -> dict[str, tuple[float, ...]]:
        """The last rewards of each prompt that the surviving weights were trained on, oldest first."""
        return {key: _rewards(connection, run_id, last, key) for key in sorted(set(prompt_keys))}

    @reads
    def recent_rewards(self, connection: Connection, run_id: str, last: int) -> tuple[float, ...]:
        """The last rewards of any prompt that the surviving weights were trained on, oldest first."""
        return _rewards(connection, run_id, last, None)

    @reads
    def lengths(self, connection: Connection, run_id: str, last: int = 10_000) -> list[tuple[int, bool]]:
        """Action tokens, and whether they were trained on, of the newest settled trajectories of training."""
        settled = (TrajectoryState.TRAINED, TrajectoryState.REJECTED)
        statement = (
            select(TrajectoryEntry.num_action_tokens, TrajectoryEntry.state, TrajectoryEntry.purpose)
            .where(TrajectoryEntry.run_id == run_id)
            .order_by(TrajectoryEntry.recorded_at.desc())
            .limit(last)
        )
        return [
            (tokens, state == TrajectoryState.TRAINED)
            for tokens, state, purpose in connection.execute(statement)
            if state in settled and purpose in TRAINING
        ]

    @reads
    def queue(self, connection: Connection, run_id: str) -> dict[str, int]:
        """Training rollouts that are pending, leased, ready and claimed; its cost does not grow with the run."""
        counts = {state.value: 0 for state in (RequestState.PENDING, RequestState.LEASED)}
        counts |= {state.value: 0 for state in (TrajectoryState.READY, TrajectoryState.CLAIMED)}
        for state, where in ((Request.state, asked(run_id)), (TrajectoryEntry.state, made(run_id))):
            statement = select(state, func.count()).where(*where).group_by(state)
            counts |= dict(connection.execute(statement).tuples().all())
        return counts

    @reads
    def counts(self, connection: Connection, run_id: str) -> dict[str, dict[str, dict[str, int]]]:
        """Everything counted: {"requests" | "trajectories": {purpose: {state: n}}}; reads an index of the whole run."""
        result: dict[str, dict[str, dict[str, int]]] = {}
        for name, model in (("requests", Request), ("trajectories", TrajectoryEntry)):
            columns = (model.purpose, model.state)
            statement = select(*columns, func.count()).where(model.run_id == run_id).group_by(*columns)
            table = result.setdefault(name, {})
            for purpose, state, count in connection.execute(statement):
                table.setdefault(purpose, {})[state] = count
        return result

    @reads
    def lost_rollouts(self, connection: Connection, run_id: str) -> dict[str, int]:
        """Why rollouts were of no use to any update → how many: rejected trajectories, and attempts that failed."""
        rejected = select(TrajectoryEntry.reject_reason, func.count()).where(
            TrajectoryEntry.run_id == run_id,
            TrajectoryEntry.state == TrajectoryState.REJECTED,
            TrajectoryEntry.segment == 0,
        )
        failed = select(FailedAttempt.reason, func.count()).where(FailedAttempt.run_id == run_id)
        lost: dict[str, int] = {}
        for statement in (rejected.group_by(TrajectoryEntry.reject_reason), failed.group_by(FailedAttempt.reason)):
            for reason, count in connection.execute(statement):
                lost[reason or "no reason recorded"] = lost.get(reason or "no reason recorded", 0) + count
        return dict(sorted(lost.items(), key=lambda item: -item[1]))


def trajectory_row(row: Row[Any]) -> TrajectoryRow:
    """A row of the table as the record of it."""
    return TrajectoryRow(
        trajectory_id=row.trajectory_id,
        run_id=row.run_id,
        request_number=row.request_number,
        attempt=row.attempt,
        segment=row.segment,
        num_segments=row.num_segments,
        purpose=Purpose(row.purpose),
        prompt_key=row.prompt_key,
        group=row.group_number,
        difficulty=row.difficulty,
        object_key=row.object_key,
        object_row=row.object_row,
        sha256=row.sha256,
        num_tokens=row.num_tokens,
        num_action_tokens=row.num_action_tokens,
        num_turns=row.num_turns,
        score=row.score,
        outcome=Outcome(row.outcome),
        stop_reason=row.stop_reason,
        version_min=row.version_min,
        version_max=row.version_max,
        greedy=row.greedy,
        state=TrajectoryState(row.state),
        reject_reason=row.reject_reason,
        claimed_step=row.claimed_step,
        trained_step=row.trained_step,
        rewound=row.rewound,
        recorded_at=row.recorded_at,
        duration_s=row.duration_s,
        environment_version=row.environment_version,
    )


def asked(run_id: str) -> tuple[ColumnElement[bool], ...]:
    """Which requests for training have no rollout yet: pending or leased."""
    return (
        Request.run_id == run_id,
        Request.state.in_([RequestState.PENDING, RequestState.LEASED]),
        Request.purpose.in_(TRAINING),
    )


def made(run_id: str) -> tuple[ColumnElement[bool], ...]:
    """Which rollouts for training no update has settled yet, each by its first segment: ready or claimed."""
    return (
        TrajectoryEntry.run_id == run_id,
        TrajectoryEntry.state.in_([TrajectoryState.READY, TrajectoryState.CLAIMED]),
        TrajectoryEntry.purpose.in_(TRAINING),
        TrajectoryEntry.segment == 0,
    )


def pinned(run_id: str, version: int) -> Select[int]:
    """The numbers of the requests that pin a policy version: its evaluation."""
    return select(Request.number).where(Request.run_id == run_id, Request.policy_version == version)


def _rewards(connection: Connection, run_id: str, last: int, prompt_key: str | None) -> tuple[float, ...]:
    where = [
        TrajectoryEntry.run_id == run_id,
        TrajectoryEntry.trained_step.is_not(None),
        TrajectoryEntry.segment == 0,
    ]
    if prompt_key is not None:
        where.append(TrajectoryEntry.prompt_key == prompt_key)
    newest_first = (TrajectoryEntry.trained_step.desc(), TrajectoryEntry.request_number.desc())
    scores = connection.execute(select(TrajectoryEntry.score).where(*where).order_by(*newest_first).limit(last))
    return tuple(reversed(scores.scalars().all()))
