"""Finished rollouts on their way to durability and back: object first, then the ledger's rows.

`TrajectoryStore` writes one object per flush and reads rows back, each checked against its sha256. `TrajectoryWriter`
is the sink of a rollout worker: it groups what is put within `flush_interval_s`, in a thread of its own, and holds no
more than a bounded number of tokens. Parts of rollouts that go on are written by the same thread, at once.
"""

from __future__ import annotations

import io
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from infra.ledger import Ledger, PartState, TrajectoryRow
from infra.objects import Corrupt, ObjectMissing, ObjectStore
from infra.rollout_parts import CorruptPart, read_parts, write_part
from infra.trajectory_format import decode, encode, row_sha256
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.parts import RolloutPart
from sao_core.trajectory import Trajectory, validate_rollout

logger = logging.getLogger(__name__)

MAX_BUFFERED_TOKENS = 8_000_000
"""Tokens that may wait to be written (17 bytes each); then `put` waits."""

MAX_OBJECT_TOKENS = 2_000_000
"""Tokens in one object, unless a single rollout has more."""


class CorruptObject(Corrupt):
    """Stored trajectories that cannot be read as they were written; the message names key and hash."""


class TrajectoryStore:
    """Trajectories as rows of Parquet objects."""

    def __init__(self, objects: ObjectStore) -> None:
        """Keep trajectories in ``objects``."""
        self.objects = objects

    def write(self, key: str, rollouts: Sequence[Rollout]) -> list[TrajectoryRow]:
        """Put ``rollouts`` as one object; returns what the ledger records of its rows."""
        trajectories = [segment for rollout in rollouts for segment in rollout]
        self.objects.put(key, encode(trajectories))
        return [TrajectoryRow.of(t, key, row, row_sha256(t)) for row, t in enumerate(trajectories)]

    def read(self, rows: Sequence[TrajectoryRow]) -> list[Rollout]:
        """The rollouts that ``rows`` describe, by request number, attempt and segment.

        Raises:
            CorruptObject: an object is missing or damaged, or a row is not what was recorded.
        """
        rollouts, damaged = self.read_intact(rows)
        if damaged:
            raise CorruptObject(next(iter(damaged.values())))
        return rollouts

    def read_intact(self, rows: Sequence[TrajectoryRow]) -> tuple[list[Rollout], dict[str, str]]:
        """Like `read`, but sets damaged rollouts aside: (intact rollouts, trajectory id → what is wrong)."""
        found: dict[str, Trajectory] = {}
        damaged: dict[str, str] = {}
        for key, members in groupby(sorted(rows, key=lambda r: (r.object_key, r.object_row)), lambda r: r.object_key):
            for row, result in self._read_object(key, list(members)):
                if isinstance(result, Trajectory):
                    found[row.trajectory_id] = result
                else:
                    damaged[row.trajectory_id] = result
        rollouts: list[Rollout] = []
        in_order = sorted(rows, key=lambda r: (r.request_number, r.attempt, r.segment))
        for _, segments in groupby(in_order, lambda r: (r.request_number, r.attempt)):
            ids = [row.trajectory_id for row in segments]
            if all(name in found for name in ids):
                rollouts.append(tuple(found[name] for name in ids))
        return rollouts, damaged

    def _read_object(self, key: str, rows: list[TrajectoryRow]) -> Iterator[tuple[TrajectoryRow, Trajectory | str]]:
        try:
            path = self.objects.local_path(key)
            if path is not None and not path.exists():
                raise ObjectMissing(f"{self.objects.url} has no object {key}")
            with pq.ParquetFile(path if path is not None else io.BytesIO(self.objects.get(key))) as file:
                trajectories = decode(file, [row.object_row for row in rows])
        except (ObjectMissing, pa.ArrowException, OSError, ValueError, IndexError, KeyError) as error:
            for row in rows:
                yield row, f"object damaged: {key} row {row.object_row} (sha256 {row.sha256}): {error}"
            return
        for row, trajectory in zip(rows, trajectories, strict=True):
            sha256 = row_sha256(trajectory)
            if (sha256, trajectory.trajectory_id) == (row.sha256, row.trajectory_id):
                yield row, trajectory
            else:
                yield row, f"object damaged: {key} row {row.object_row}: sha256 is {sha256}, recorded was {row.sha256}"


class TrajectoryWriter:
    """The `TrajectorySink` of one rollout worker.

    Consumes what `put` gives it and waits for: `flush_interval_s` after the first, or a flush. Each round puts one
    object, then records its rows in one transaction. Parts wait for nothing and go before the rollouts, so that the
    whole of a rollout is never recorded before its parts. After a failure every call raises it.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: TrajectoryStore,
        run_id: str,
        worker: str,
        *,
        flush_interval_s: float = 0.5,
        max_buffered_tokens: int = MAX_BUFFERED_TOKENS,
    ) -> None:
        """Write for ``worker``, whose leases decide what the ledger accepts."""
        self._ledger = ledger
        self._store = store
        self._run_id = run_id
        self._worker = worker
        self._flush_interval_s = flush_interval_s
        self._max_buffered_tokens = max_buffered_tokens
        self._changed = threading.Condition()
        self._buffer: list[Rollout] = []
        self._parts: deque[RolloutPart] = deque()
        self._part_keys: dict[tuple[int, int], list[str]] = {}
        self._buffered_tokens = 0
        self._due = float("inf")
        self._in_flight = False
        self._closing = False
        self._error: Exception | None = None
        self._objects = 0
        self.recorded = 0
        """Rollouts that are durable and known to the ledger."""
        self.refused = 0
        """Rollouts that came after their lease was lost."""
        self._thread = threading.Thread(target=self._run, name="trajectory-writer", daemon=True)
        self._thread.start()

    def put(self, rollout: Rollout) -> None:
        """Take a finished rollout; waits while too many tokens are buffered.

        Raises:
            InvalidTrajectory: the record breaks a rule.
            Exception: what an earlier flush failed with.
        """
        validate_rollout(rollout)
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._has_room() or not (self._buffer or self._parts))
            self._raise()
            self._buffer.append(rollout)
            self._buffered_tokens += _num_tokens(rollout)
            self._due = min(self._due, time.monotonic() + self._flush_interval_s)
            self._changed.notify_all()

    def put_part(self, part: RolloutPart) -> bool:
        """Take a part of a rollout that goes on, to be written at once; False while too many tokens are buffered.

        Raises:
            Exception: what an earlier write failed with.
        """
        with self._changed:
            self._raise()
            if not self._has_room():
                return False
            self._parts.append(part)
            self._buffered_tokens += part.num_tokens
            self._changed.notify_all()
            return True

    def parts(self, request: RolloutRequest) -> tuple[RolloutPart, ...]:
        """The parts that earlier workers left of a leased request, in order; () if one of them is damaged."""
        rows = self._ledger.parts(self._run_id, request.number, request.attempt, state=PartState.OPEN)
        try:
            parts = read_parts(self._store.objects, rows)
        except CorruptPart as error:
            logger.error("%s", error)
            return ()
        with self._changed:
            self._part_keys[request.number, request.attempt] = [row.object_key for row in rows]
        return parts

    def give_up_parts(self, request: RolloutRequest) -> None:
        """Say that a rollout starts anew; the parts of the attempt so far are kept for analysis."""
        self._ledger.give_up_parts(self._run_id, self._worker, request.number, request.attempt)
        with self._changed:
            self._part_keys.pop((request.number, request.attempt), None)

    def flush(self, wait: bool = False) -> None:
        """Store what is buffered now; with ``wait``, return when it is durable and recorded."""
        with self._changed:
            if self._buffer:
                self._due = time.monotonic()
                self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._error or not (self._buffer or self._parts or self._in_flight))
            self._raise()

    def close(self) -> None:
        """Flush, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._parts or time.monotonic() >= self._due):
                    self._changed.wait(None if self._due == float("inf") else max(0.0, self._due - time.monotonic()))
                part = self._take_part()
                batch = [] if part is not None else self._take()
                if part is None and not batch:
                    return
                self._in_flight = True
            try:
                if part is not None:
                    self._store_part(part)
                else:
                    self._store_batch(batch)
            except Exception as error:  # whatever it is must reach the loop that puts
                logger.exception("worker %s could not store %d rollouts", self._worker, max(len(batch), 1))
                self._error = error
            with self._changed:
                self._in_flight = False
                self._changed.notify_all()
            if self._error:
                return

    def _take(self) -> list[Rollout]:
        """The oldest rollouts that fit into one object; the rest stays due."""
        batch: list[Rollout] = []
        tokens = 0
        for rollout in self._buffer:
            tokens += _num_tokens(rollout)
            if batch and tokens > MAX_OBJECT_TOKENS:
                break
            batch.append(rollout)
        self._buffer = self._buffer[len(batch) :]
        self._buffered_tokens -= sum(_num_tokens(rollout) for rollout in batch)
        if not self._buffer:
            self._due = float("inf")
        return batch

    def _take_part(self) -> RolloutPart | None:
        if not self._parts:
            return None
        part = self._parts.popleft()
        self._buffered_tokens -= part.num_tokens
        return part

    def _has_room(self) -> bool:
        return self._buffered_tokens < self._max_buffered_tokens

    def _store_part(self, part: RolloutPart) -> None:
        row = write_part(self._store.objects, self._worker, part)
        if self._ledger.record_part(self._run_id, self._worker, row):
            with self._changed:
                self._part_keys.setdefault((row.request_number, row.attempt), []).append(row.object_key)
        else:
            self._store.objects.delete(row.object_key)
            logger.warning("a part of request %d of worker %s came after its lease", row.request_number, self._worker)

    def _store_batch(self, batch: list[Rollout]) -> None:
        self._objects += 1
        name = f"{self._objects:06d}-{secrets.token_hex(4)}.parquet"
        key = f"runs/{self._run_id}/trajectories/{self._worker}/{name}"
        rows = self._store.write(key, batch)
        accepted = set(self._ledger.record(self._run_id, self._worker, rows))
        recorded = sum(rollout[0].trajectory_id in accepted for rollout in batch)
        self.recorded += recorded
        self.refused += len(batch) - recorded
        if not accepted:
            self._store.objects.delete(key)
        if recorded < len(batch):
            logger.warning("%d rollouts of worker %s came after their lease", len(batch) - recorded, self._worker)
        for rollout in batch:
            first = rollout[0]
            with self._changed:
                part_keys = self._part_keys.pop((first.request_number, first.attempt), [])
            if first.trajectory_id in accepted:
                for part_key in part_keys:
                    self._store.objects.delete(part_key)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _num_tokens(rollout: Rollout) -> int:
    return sum(segment.num_tokens for segment in rollout)
