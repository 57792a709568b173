"""What the learner reads and writes, over ledger and object store: the `BatchSource` and `UpdateSink` of a run.

Both belong to one attempt of the run; once the run is resumed elsewhere they raise `Fenced`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from infra.checkpoints import CheckpointStore
from infra.ledger import Ledger, TrajectoryRow
from infra.manifest import CorruptFolder
from infra.policy_store import PolicyStore
from infra.trajectory_store import CorruptObject, TrajectoryStore
from infra.update_records import write_update_tokens
from sao_core.algorithms import Advantage, Algorithm
from sao_core.protocols import Batch, Rollout, TasksOver, UpdateRecord
from sao_core.trajectory import Purpose

logger = logging.getLogger(__name__)


class LedgerBatches:
    """The `BatchSource` of one attempt of a run."""

    def __init__(
        self,
        ledger: Ledger,
        store: TrajectoryStore,
        run_id: str,
        algorithm: Algorithm,
        batch_size: int,
        *,
        attempt: int | None = None,
        ends: bool = False,
    ) -> None:
        """Claim batches of ``batch_size`` rollouts, with the earlier rewards that ``algorithm`` looks back on.

        ``ends`` says that the tasks may come to an end.
        """
        self._ends = ends
        self._ledger = ledger
        self._store = store
        self._run_id = run_id
        self._algorithm = algorithm
        self._batch_size = batch_size
        self._attempt = attempt
        self._looked_at = ledger.now()
        self._policy_steps: dict[int, int] = {}

    def claim(self, step: int) -> Batch | None:
        """The oldest ready rollouts for this step (the same ones if asked again), or None if too few.

        A rollout that cannot be read as it was written is rejected, counted and replaced by the next one. Raises
        `TasksOver` once there will be no more.
        """
        while (size := self._claimable(step)) is not None:
            rows = self._ledger.claim(self._run_id, step, size, attempt=self._attempt)
            if not rows:
                return None
            rollouts, damaged = self._store.read_intact(rows)
            if not damaged:
                ready = self._ledger.queue(self._run_id)["ready"]
                rewound = frozenset(row.trajectory_id for row in rows if row.rewound and row.segment == 0)
                return Batch(step, tuple(rollouts), self._baselines(rows), self._rejections(), rewound, ready)
            for problem in damaged.values():
                logger.error("rejected: %s", problem)
            self._ledger.reject_claimed(self._run_id, step, damaged, attempt=self._attempt)
        return None

    def _claimable(self, step: int) -> int | None:
        """How many rollouts the batch of ``step`` has: a full one, the rest that there is, or None: not yet."""
        if self._ledger.can_claim(self._run_id, step, self._batch_size):
            return self._batch_size
        rest = self._ledger.rest(self._run_id, step) if self._ends else None
        if rest == 0:
            raise TasksOver
        return None if rest is None else min(rest, self._batch_size)  # more may have come since the look before

    def collected(self, purpose: Purpose) -> int:
        """How many rollouts of a purpose that no update consumes are stored."""
        return self._ledger.num_rollouts(self._run_id, purpose)

    def read(self, purpose: Purpose) -> list[Rollout]:
        """All stored rollouts of a purpose that no update consumes; damaged ones are left out, with an error logged."""
        rollouts, damaged = self._store.read_intact(self._ledger.kept(self._run_id, purpose))
        for problem in damaged.values():
            logger.error("left out: %s", problem)
        if damaged and not rollouts:
            raise CorruptObject(next(iter(damaged.values())))
        return rollouts

    def policy_steps(self) -> Mapping[int, int]:
        """Version → step of the policy (for a superseded one, of its last surviving ancestor)."""
        newest = next(reversed(self._policy_steps), -1)  # in the order of versions
        self._policy_steps |= self._ledger.policy_steps(self._run_id, newest + 1)
        return self._policy_steps

    def _baselines(self, rows: Sequence[TrajectoryRow]) -> dict[str, tuple[float, ...]]:
        window = self._algorithm.window
        if window is None:
            return {}
        first = [row for row in rows if row.segment == 0]
        if self._algorithm.advantage is Advantage.RUNNING_MEAN_GLOBAL:
            rewards = self._ledger.recent_rewards(self._run_id, window)
            return {row.trajectory_id: rewards for row in first}
        by_prompt = self._ledger.prompt_rewards(self._run_id, (row.prompt_key for row in first), window)
        return {row.trajectory_id: by_prompt[row.prompt_key] for row in first}

    def _rejections(self) -> dict[str, int]:
        since, self._looked_at = self._looked_at, self._ledger.now()
        return self._ledger.rejected_since(self._run_id, since, self._looked_at)


class LedgerUpdates:
    """The `UpdateSink` of one attempt of a run."""

    def __init__(
        self,
        ledger: Ledger,
        policies: PolicyStore,
        checkpoints: CheckpointStore,
        run_id: str,
        *,
        keep_policies: int | None = None,
        worker_silent_s: float = 90.0,
        attempt: int | None = None,
    ) -> None:
        """Write for ``attempt``; policies that nothing needs are removed but the ``keep_policies`` newest (None: all).

        A worker that was silent for ``worker_silent_s`` counts as dead there.
        """
        self._ledger = ledger
        self._policies = policies
        self._checkpoints = checkpoints
        self._run_id = run_id
        self._keep_policies = keep_policies
        self._worker_silent_s = worker_silent_s
        self._attempt = attempt
        self._upkeep = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy-upkeep")
        self._pruning: Future[list[int]] | None = None

    def publish_initial(self, folder: Path, step: int) -> int:
        """Store a policy folder and announce it; returns its version.

        The newest policy is announced again, not stored anew, if it has the same files (a first attempt that ended
        before its first checkpoint).
        """
        self._ledger.require_attempt(self._run_id, self._attempt)
        version = self._ledger.next_version(self._run_id)
        policy = self._policies.put(self._run_id, version, folder, attempt=self._attempt)
        newest = self._ledger.newest_policy(self._run_id)
        if newest is not None and (newest.sha256, newest.step, newest.removed_at) == (policy.sha256, step, None):
            self._policies.discard(policy)
            self._ledger.announce(self._run_id, newest.version, attempt=self._attempt)
            return newest.version
        parent = None if newest is None else newest.version
        self._ledger.add_policy(self._run_id, policy, step, parent, attempt=self._attempt)
        return version

    def commit(self, record: UpdateRecord, policy_folder: Path | None) -> None:
        """Store the policy (if its weights changed), then commit the step and announce it in one transaction.

        ``policy_folder`` is given away: its files move into the store.
        """
        self._ledger.require_attempt(self._run_id, self._attempt)
        if record.tokens:
            write_update_tokens(self._policies.objects, self._run_id, record.step, record.tokens)
        policy = None
        if policy_folder is not None:
            policy = self._policies.put(
                self._run_id, record.version_after, policy_folder, move=True, attempt=self._attempt
            )
        self._ledger.commit_update(
            self._run_id,
            record.step,
            record.version_before,
            record.version_after,
            record.metrics,
            record.trained,
            record.rejected,
            policy,
            attempt=self._attempt,
        )
        self._prune()

    def next_version(self) -> int:
        """The version number that a new policy gets; numbers only grow."""
        return self._ledger.next_version(self._run_id)

    def checkpoint(self, step: int, folder: Path) -> None:
        """Store a complete checkpoint from ``folder``, which is given away; returns before it is durable."""
        policy = self._ledger.newest_policy(self._run_id)
        sync = None if policy is None else lambda: self._policies.sync(self._run_id, policy.version)
        self._checkpoints.save(step, folder, sync)

    def flush(self) -> None:
        """Wait until every checkpoint asked for is stored."""
        self._checkpoints.flush()

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Go back to the newest intact checkpoint: its step and local folder, hashes checked; None: to the start.

        The ledger is rewound to it (what was trained later is ready again), and its policy is announced for this
        attempt, so that workers may begin.

        Raises:
            Fenced: the run has moved on to a later attempt, which may have removed the checkpoints that this one saw.
            CorruptFolder: there are checkpoints, and all are damaged.
        """
        try:
            latest = self._checkpoints.latest()
            self._ledger.rewind(self._run_id, 0 if latest is None else latest[0], attempt=self._attempt)
            policy = self._ledger.newest_policy(self._run_id)
            if latest is not None and policy is not None:
                self._policies.fetch(self._run_id, policy.version)
                self._ledger.announce(self._run_id, policy.version, attempt=self._attempt)
        except CorruptFolder:
            self._ledger.require_attempt(self._run_id, self._attempt)
            raise
        return latest

    def close(self) -> None:
        """Flush, and end the threads."""
        try:
            self._checkpoints.close()
        finally:
            self._upkeep.shutdown()

    def _prune(self) -> None:
        if self._keep_policies is None or (self._pruning is not None and not self._pruning.done()):
            return
        if self._pruning is not None and (error := self._pruning.exception()) is not None:
            logger.warning("old policies could not be removed: %s", error)
        self._pruning = self._upkeep.submit(
            self._policies.prune, self._run_id, self._keep_policies, self._worker_silent_s, attempt=self._attempt
        )
