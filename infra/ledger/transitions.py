"""Moves that several operations share, inside their transaction: locking requests, giving an attempt up, fencing,
and what becomes of the parts of unfinished rollouts.

Requests are always locked in the order of their numbers and together with the rest of their group, so that two
workers that finish members of one group take turns and cannot deadlock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from infra.ledger.database import clock
from infra.ledger.records import Fenced, PartState, RequestState, TrajectoryState, UnknownRun
from infra.models import Base, FailedAttempt, Request, RolloutPart, Run, TrajectoryEntry
from sao_core.trajectory import Sampling

GROUP_EXHAUSTED = "group_exhausted"
"""Why the trajectories of a group go when one of its members ran out of attempts."""

CHUNK = 5000
"""Values in one IN list."""


@dataclass(frozen=True)
class GivenUp:
    """An attempt that gave nothing to train on."""

    number: int
    attempt: int
    worker: str | None
    reason: str


def chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Cut ``values`` into lists that fit into one statement."""
    everything = list(values)
    for start in range(0, len(everything), CHUNK):
        yield everything[start : start + CHUNK]


def require_attempt(connection: Connection, run_id: str, attempt: int | None, *, lock: bool = True) -> int:
    """Return the run's attempt, and lock the run: the learner's steps and a resume take turns.

    Raises:
        UnknownRun: there is no such run.
        Fenced: ``attempt`` is given and the run has moved on to a later one.
    """
    statement = select(Run.attempt).where(Run.run_id == run_id)
    current = connection.execute(statement.with_for_update() if lock else statement).scalar_one_or_none()
    if current is None:
        raise UnknownRun(f"there is no run {run_id}")
    if attempt is not None and attempt != current:
        raise Fenced(
            f"run {run_id} is at its attempt {current}, this process belongs to attempt {attempt} and must stop: "
            "the run was resumed elsewhere"
        )
    return current


def lock_requests(connection: Connection, run_id: str, numbers: Iterable[int]) -> dict[int, Any]:
    """Lock requests and the other members of their groups; returns all of them by number.

    Each row has the columns of `Request` and ``lease_holds`` (the lease has time left, by the database's clock).
    """
    wanted = sorted(set(numbers))
    groups: set[int] = set()
    for chunk in chunks(wanted):
        found = select(Request.group_number).where(Request.run_id == run_id, Request.number.in_(chunk))
        groups.update(group for group in connection.execute(found).scalars() if group is not None)
    locked: dict[int, Any] = {}
    for chunk in chunks(wanted):
        belongs = [Request.number.in_(chunk), *([Request.group_number.in_(sorted(groups))] if groups else [])]
        statement = (
            select(*Request.__table__.c, (Request.lease_until > clock()).label("lease_holds"))
            .where(Request.run_id == run_id, or_(*belongs))
            .order_by(Request.number)
            .with_for_update()
        )
        for row in connection.execute(statement):
            locked[row.number] = row
    return locked


def give_up(connection: Connection, run_id: str, attempts: Sequence[GivenUp]) -> None:
    """Count failed attempts; reissue their requests, or exhaust those that had ``max_attempts``.

    The requests are locked and still held by these attempts. An exhausted member of a group rejects the group's
    ready trajectories and cancels what the group still waits for. Parts stay open if another attempt can go on from
    them.
    """
    if not attempts:
        return
    count_failures(connection, run_id, attempts)
    numbers = [given_up.number for given_up in attempts]
    max_attempts = select(Run.max_attempts).where(Run.run_id == run_id).scalar_subquery()
    for chunk in chunks(numbers):
        mine = (Request.run_id == run_id, Request.number.in_(chunk))
        unleased = {"lease_worker": None, "lease_until": None}
        exhausted = connection.execute(
            update(Request)
            .where(*mine, Request.attempts >= max_attempts)
            .values(state=RequestState.EXHAUSTED, **unleased)
            .returning(Request.group_number)
        ).scalars()
        groups = {group for group in exhausted if group is not None}
        connection.execute(
            update(Request).where(*mine, Request.attempts < max_attempts).values(state=RequestState.PENDING, **unleased)
        )
        for group in sorted(groups):
            numbers += _reject_group(connection, run_id, group)
    settle_parts(connection, run_id, numbers)


def hand_on_parts(connection: Connection, run_id: str, attempts: Mapping[int, int]) -> dict[int, int]:
    """Give the open parts of leased requests (number → new attempt) to that attempt; how many each has."""
    found = _open_parts(connection, run_id, attempts)
    for number in found:
        connection.execute(update(RolloutPart).where(*_open(run_id, [number])).values(attempt=attempts[number]))
    return {number: len(restorable) for number, restorable in found.items()}


def settle_parts(connection: Connection, run_id: str, numbers: Iterable[int]) -> None:
    """After requests were given up, given back or ended: keep open only what somebody can go on from."""
    stranded = []
    for number, restorable in _open_parts(connection, run_id, numbers).items():
        where = (Request.run_id == run_id, Request.number == number)
        state = connection.execute(select(Request.state).where(*where)).scalar_one()
        if state not in (RequestState.PENDING, RequestState.LEASED) or not restorable[-1]:
            stranded.append(number)
    fail_parts(connection, run_id, stranded)


def fail_parts(connection: Connection, run_id: str, numbers: Iterable[int]) -> None:
    """Keep the open parts of requests for analysis only."""
    for chunk in chunks(numbers):
        connection.execute(update(RolloutPart).where(*_open(run_id, chunk)).values(state=PartState.FAILED))


def remove_parts(connection: Connection, run_id: str, numbers: Iterable[int]) -> None:
    """Forget the open parts of requests whose rollout is recorded whole."""
    for chunk in chunks(numbers):
        connection.execute(delete(RolloutPart).where(*_open(run_id, chunk)))


def _open(run_id: str, numbers: Sequence[int]) -> tuple[Any, ...]:
    return (
        RolloutPart.run_id == run_id,
        RolloutPart.request_number.in_(numbers),
        RolloutPart.state == PartState.OPEN,
    )


def _open_parts(connection: Connection, run_id: str, numbers: Iterable[int]) -> dict[int, list[bool]]:
    """For each request that has open parts: whether each of them can be restored from, in order."""
    found: dict[int, list[bool]] = {}
    columns = (RolloutPart.request_number, RolloutPart.restorable)
    for chunk in chunks(numbers):
        statement = select(*columns).where(*_open(run_id, chunk)).order_by(RolloutPart.part)
        for number, restorable in connection.execute(statement):
            found.setdefault(number, []).append(restorable)
    return found


def count_failures(connection: Connection, run_id: str, attempts: Sequence[GivenUp]) -> None:
    """Write down that attempts failed, once each."""
    rows = [
        {
            "run_id": run_id,
            "request_number": given_up.number,
            "attempt": given_up.attempt,
            "worker": given_up.worker,
            "reason": reason_label(given_up.reason),
            "detail": given_up.reason,
            "failed_at": clock(),
        }
        for given_up in attempts
    ]
    for row in rows:
        insert_new(connection, FailedAttempt, row)


def reason_label(reason: str) -> str:
    """A short name for counting: what stands before the first colon, in letters, digits and underscores."""
    head = reason.partition(":")[0].strip().lower()[:60]
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in head).strip("_") or "unknown"


def insert_new(connection: Connection, model: type[Base], row: Mapping[str, Any]) -> bool:
    """Insert ``row`` unless its key is there already; whether it was inserted."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(model).values(dict(row)).on_conflict_do_nothing()
    return connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1


def insert_all(connection: Connection, model: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert ``rows`` in one statement."""
    if rows:
        connection.execute(insert(model), [dict(row) for row in rows])


def _reject_group(connection: Connection, run_id: str, group: int) -> list[int]:
    """Reject what is ready of a group and cancel what it waits for; returns the numbers of those requests."""
    connection.execute(
        update(TrajectoryEntry)
        .where(
            TrajectoryEntry.run_id == run_id,
            TrajectoryEntry.group_number == group,
            TrajectoryEntry.state == TrajectoryState.READY,
        )
        .values(state=TrajectoryState.REJECTED, reject_reason=GROUP_EXHAUSTED)
    )
    cancelled = connection.execute(
        update(Request)
        .where(
            Request.run_id == run_id,
            Request.group_number == group,
            Request.state.in_([RequestState.PENDING, RequestState.LEASED]),
        )
        .values(state=RequestState.CANCELLED, lease_worker=None, lease_until=None)
        .returning(Request.number)
    )
    return list(cancelled.scalars())


def dump_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics as JSON that every reader takes: a number that is not finite becomes null."""
    finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps(finite, sort_keys=True, allow_nan=False)


def load_metrics(text: str) -> dict[str, float]:
    """The inverse of :func:`dump_metrics`; null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in json.loads(text).items()}


def dump_sampling(sampling: Sampling) -> str:
    """A sampler's settings as JSON."""
    return json.dumps(asdict(sampling), sort_keys=True)


def load_sampling(text: str) -> Sampling:
    """The inverse of :func:`dump_sampling`."""
    return Sampling(**json.loads(text))
