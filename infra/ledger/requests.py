"""Requests in the ledger: issued by the flow, leased by workers, fenced, reissued, exhausted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select, union_all, update

from infra.ledger.database import Database, clock, reads, writes
from infra.ledger.frontier import advance_frontier
from infra.ledger.history import asked, made
from infra.ledger.records import (
    TRAINING,
    Fenced,
    LedgerError,
    NewRequest,
    RequestState,
    UnknownRun,
    WorkerRecord,
)
from infra.ledger.runs import give_back
from infra.ledger.transitions import (
    GivenUp,
    chunks,
    dump_sampling,
    give_up,
    hand_on_parts,
    insert_all,
    insert_new,
    load_sampling,
    lock_requests,
    require_attempt,
    settle_parts,
)
from infra.models import EvaluationOrder, Policy, Request, Run, TrajectoryEntry, Worker
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Purpose

LEASE_EXPIRED = "lease expired: its worker was silent for too long"


class RequestLedger(Database):
    """The queue between the flow and its rollout workers."""

    @writes
    def issue(
        self,
        connection: Connection,
        run_id: str,
        requests: Sequence[NewRequest],
        *,
        frontier: int | None = None,
    ) -> list[int]:
        """Ask for rollouts; returns their numbers, which follow the last ones without a gap.

        ``frontier`` makes it idempotent: what the caller read as `prompts_issued` of this purpose. If prompts were
        issued since, nothing is issued and the list is empty.

        Raises:
            LedgerError: a group is issued in parts, or a pinned policy version is not in the store.
        """
        if not requests:
            return []
        purposes = sorted({request.purpose for request in requests})
        if frontier is not None and len(purposes) > 1:
            raise LedgerError(f"a frontier guards one purpose at a time: got requests of {', '.join(purposes)}")
        sizes = Counter(request.group for request in requests if request.group is not None)
        for purpose in purposes:
            mine = [request for request in requests if request.purpose == purpose]
            prompts = sum(request.group is None for request in mine) + len({r.group for r in mine} - {None})
            if not advance_frontier(connection, run_id, purpose, prompts, frontier):
                return []
        after = connection.execute(
            update(Run)
            .where(Run.run_id == run_id)
            .values(next_request=Run.next_request + len(requests))
            .returning(Run.next_request)
        ).scalar_one_or_none()
        if after is None:
            raise UnknownRun(f"there is no run {run_id}")
        _check_groups(connection, run_id, sizes)
        versions = {request.policy_version for request in requests if request.policy_version is not None}
        _check_versions(connection, run_id, versions)
        for version in sorted(versions):
            insert_new(connection, EvaluationOrder, {"run_id": run_id, "version": version, "reported": False})
        now = connection.execute(select(clock())).scalar_one()
        numbers = list(range(after - len(requests), after))
        rows = [
            {
                "run_id": run_id,
                "number": number,
                "purpose": request.purpose,
                "prompt_key": request.prompt_key,
                "group_number": request.group,
                "group_size": 1 if request.group is None else sizes[request.group],
                "sampling_json": dump_sampling(request.sampling),
                "policy_version": request.policy_version,
                "state": RequestState.PENDING,
                "attempts": 0,
                "issued_at": now,
            }
            for number, request in zip(numbers, requests, strict=True)
        ]
        insert_all(connection, Request, rows)
        return numbers

    @reads
    def outstanding(self, connection: Connection, run_id: str) -> int:
        """Rollouts for training that are pending, leased, ready or claimed; what back-pressure bounds."""
        waiting, there = (
            select(func.count()).where(*where).scalar_subquery() for where in (asked(run_id), made(run_id))
        )
        return connection.execute(select(waiting + there)).scalar_one()

    @writes
    def lease(
        self,
        connection: Connection,
        run_id: str,
        worker: str,
        purposes: Iterable[Purpose],
        limit: int,
        lease_s: float,
        version: int | None = None,
        *,
        window: int | None = None,
        attempt: int | None = None,
    ) -> list[RolloutRequest]:
        """Give ``worker`` the oldest waiting requests, for ``lease_s`` unless a heartbeat renews them.

        Leases that ran out are taken back first, which costs their request an attempt. ``version`` takes only
        requests that pin this policy version. ``window`` bounds how far rollouts for training run ahead: a request
        waits while that many outstanding ones were issued before it, which happens after a rewind only. Attempts of a
        request are counted from 1.

        Raises:
            Fenced: the worker is of an earlier ``attempt`` of the run.
        """
        require_attempt(connection, run_id, attempt, lock=False)
        purposes = tuple(purposes)
        take_back(connection, run_id)
        waiting = (
            select(Request.number, Request.purpose)
            .where(Request.run_id == run_id, Request.state == RequestState.PENDING, Request.purpose.in_(purposes))
            .order_by(Request.number)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        if version is not None:
            waiting = waiting.where(Request.policy_version == version)
        found = connection.execute(waiting).all()
        end = None if window is None or not found else _end_of_window(connection, run_id, window)
        numbers = [row.number for row in found if end is None or row.number <= end or row.purpose not in TRAINING]
        leased: list[Row[Any]] = []
        for chunk in chunks(numbers):
            leased += connection.execute(
                update(Request)
                .where(Request.run_id == run_id, Request.number.in_(chunk))
                .values(
                    state=RequestState.LEASED,
                    attempts=Request.attempts + 1,
                    lease_worker=worker,
                    lease_until=clock() + lease_s,
                )
                .returning(*Request.__table__.c)
            ).all()
        parts = hand_on_parts(connection, run_id, {row.number: row.attempts for row in leased})
        return [
            RolloutRequest(
                run_id=run_id,
                number=row.number,
                attempt=row.attempts,
                purpose=Purpose(row.purpose),
                prompt_key=row.prompt_key,
                group=row.group_number,
                sampling=load_sampling(row.sampling_json),
                policy_version=row.policy_version,
                parts=parts.get(row.number, 0),
            )
            for row in sorted(leased, key=lambda row: row.number)
        ]

    @writes
    def heartbeat(
        self,
        connection: Connection,
        run_id: str,
        worker: str,
        state: str,
        version: int | None,
        host: str,
        pid: int,
        lease_s: float,
        error: str | None = None,
        *,
        purposes: Iterable[Purpose] = (),
        holding: Collection[int] | None = None,
    ) -> list[int]:
        """Say that ``worker`` lives, and renew its leases: all, or those in ``holding``; returns what it holds.

        A lease that ran out is renewed too, as long as nobody else took it. A lease that is not in ``holding`` (its
        answer was lost on the way) is left to run out.

        Raises:
            Fenced: another process goes by this name; names are per process (:func:`infra.requests.new_worker_id`).
        """
        seen = {
            "state": state,
            "version": version,
            "purposes": " ".join(sorted(purposes)),
            "heartbeat_at": clock(),
            "error": error,
        }
        mine = (Worker.run_id == run_id, Worker.worker == worker)
        process = (Worker.host == host, Worker.pid == pid)
        if not connection.execute(update(Worker).where(*mine, *process).values(**seen)).rowcount:
            row = {"run_id": run_id, "worker": worker, "host": host, "pid": pid, **seen}
            if not insert_new(connection, Worker, row):
                raise Fenced(f"another process serves run {run_id} as worker {worker}; names must be new per process")
        leased = (Request.run_id == run_id, Request.state == RequestState.LEASED, Request.lease_worker == worker)
        held = connection.execute(select(Request.number).where(*leased)).scalars()
        numbers: list[int] = []
        for chunk in chunks(sorted(number for number in held if holding is None or number in holding)):
            where = (*leased, Request.number.in_(chunk))
            lock = select(Request.number).where(*where).order_by(Request.number).with_for_update()
            numbers += connection.execute(lock).scalars()
            connection.execute(update(Request).where(*where).values(lease_until=clock() + lease_s))
        return numbers

    @writes
    def release(self, connection: Connection, run_id: str, worker: str) -> int:
        """Give a worker's leases back without spending an attempt; how many there were."""
        return give_back(connection, run_id, Request.lease_worker == worker)

    @writes
    def expire(self, connection: Connection, run_id: str, worker: str | None = None) -> int:
        """Take back leases that ran out, or all of ``worker``, which is known to be dead; how many there were."""
        return take_back(connection, run_id, worker)

    @writes
    def fail_attempt(
        self, connection: Connection, run_id: str, worker: str, number: int, attempt: int, reason: str
    ) -> RequestState:
        """Give an attempt up that has nothing to record; returns where its request stands now.

        An attempt that does not hold the lease any more changes nothing.
        """
        request = lock_requests(connection, run_id, [number]).get(number)
        if request is None:
            raise LedgerError(f"run {run_id} has no request {number}")
        if (request.state, request.lease_worker, request.attempts) == (RequestState.LEASED, worker, attempt):
            give_up(connection, run_id, [GivenUp(number, attempt, worker, reason)])
        now = select(Request.state).where(Request.run_id == run_id, Request.number == number)
        return RequestState(connection.execute(now).scalar_one())

    @writes
    def cancel_requests(
        self,
        connection: Connection,
        run_id: str,
        purposes: Iterable[Purpose] | None = None,
        version: int | None = None,
    ) -> int:
        """Cancel what is pending or leased (of some purposes, of a pinned version); how many there were."""
        open_states = [RequestState.PENDING, RequestState.LEASED]
        statement = update(Request).where(Request.run_id == run_id, Request.state.in_(open_states))
        if purposes is not None:
            statement = statement.where(Request.purpose.in_(tuple(purposes)))
        if version is not None:
            statement = statement.where(Request.policy_version == version)
        values = {"state": RequestState.CANCELLED, "lease_worker": None, "lease_until": None}
        numbers = connection.execute(statement.values(**values).returning(Request.number)).scalars().all()
        settle_parts(connection, run_id, numbers)
        return len(numbers)

    @reads
    def request_states(
        self, connection: Connection, run_id: str, purpose: Purpose, version: int | None = None
    ) -> dict[RequestState, int]:
        """How many requests of a purpose (and a pinned version) stand where; absent means none."""
        statement = select(Request.state, func.count()).where(Request.run_id == run_id, Request.purpose == purpose)
        if version is not None:
            statement = statement.where(Request.policy_version == version)
        rows = connection.execute(statement.group_by(Request.state))
        return {RequestState(state): count for state, count in rows}

    @reads
    def workers(self, connection: Connection, run_id: str) -> list[WorkerRecord]:
        """Every process that served the run, by name."""
        columns = (*Worker.__table__.c, (clock() - Worker.heartbeat_at).label("silent_s"))
        rows = connection.execute(select(*columns).where(Worker.run_id == run_id).order_by(Worker.worker))
        return [
            WorkerRecord(
                worker=row.worker,
                host=row.host,
                pid=row.pid,
                state=row.state,
                version=row.version,
                purposes=tuple(row.purposes.split()),
                heartbeat_at=row.heartbeat_at,
                silent_s=row.silent_s,
                error=row.error,
            )
            for row in rows
        ]


def take_back(connection: Connection, run_id: str, worker: str | None = None) -> int:
    """Give up the attempts whose lease ran out, or those of a dead worker."""
    leased = (Request.run_id == run_id, Request.state == RequestState.LEASED)
    dead = Request.lease_until <= clock() if worker is None else Request.lease_worker == worker
    found = connection.execute(select(Request.number).where(*leased, dead)).scalars().all()
    if not found:
        return 0
    locked = lock_requests(connection, run_id, found)
    given_up = [
        GivenUp(number, row.attempts, row.lease_worker, LEASE_EXPIRED)
        for number in found
        if (row := locked[number]).state == RequestState.LEASED
        and (not row.lease_holds if worker is None else row.lease_worker == worker)
    ]
    give_up(connection, run_id, given_up)
    return len(given_up)


def _end_of_window(connection: Connection, run_id: str, window: int) -> int | None:
    """The ``window``-th oldest of the outstanding requests for training; None if there are fewer."""
    numbers = (
        select(Request.number).where(*asked(run_id)),
        select(TrajectoryEntry.request_number).where(*made(run_id)),
    )
    outstanding = sorted(connection.execute(union_all(*numbers)).scalars())
    return outstanding[window - 1] if window <= len(outstanding) else None


def _check_groups(connection: Connection, run_id: str, sizes: Mapping[int, int]) -> None:
    for chunk in chunks(sizes):
        known = connection.execute(
            select(Request.group_number).where(Request.run_id == run_id, Request.group_number.in_(chunk)).limit(1)
        ).scalar_one_or_none()
        if known is not None:
            raise LedgerError(f"group {known} of run {run_id} was issued before: issue all members in one call")


def _check_versions(connection: Connection, run_id: str, versions: Collection[int]) -> None:
    for version in sorted(versions):
        stored = connection.execute(
            select(Policy.version)
            .where(Policy.run_id == run_id, Policy.version == version, Policy.removed_at.is_(None))
            .with_for_update()
        ).scalar_one_or_none()
        if stored is None:
            raise LedgerError(f"policy version {version} of run {run_id} is not in the store, or not any more")
