"""What the loops need from outside, as protocols; infra implements them, tests use in-memory ones.

The rollout loop reads a :class:`RequestSource` and a :class:`PolicyFeed` and writes a
:class:`TrajectorySink`; the learner reads a :class:`BatchSource` and writes an :class:`UpdateSink`.
Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sao_core.rollout.parts import RolloutPart
from sao_core.trajectory import Purpose, Sampling, Trajectory

Rollout = tuple[Trajectory, ...]
"""All segments of one rollout, in order; one element unless a template rewrote history."""


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to make: which prompt, which attempt, how to sample."""

    run_id: str
    number: int
    attempt: int
    purpose: Purpose
    prompt_key: str
    group: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    policy_version: int | None = None
    """Evaluation pins the version to use; training takes the newest."""
    parts: int = 0
    """Parts that earlier workers left of this rollout, which goes on from there."""


class RequestSource(Protocol):
    """Where rollout workers get work. A lease is held until its rollout is recorded or failed."""

    def lease(self, limit: int) -> list[RolloutRequest]:
        """At most ``limit`` requests, leased to this worker; empty if there is nothing to do."""
        ...

    def fail(self, request: RolloutRequest, reason: str) -> None:
        """Give up this attempt; it is reissued up to ``max_attempts``, then exhausted."""
        ...

    def heartbeat(self, state: str, version: int | None) -> None:
        """Say that the worker lives, and renew its leases."""
        ...


class TrajectorySink(Protocol):
    """Takes finished rollouts and makes them durable beside the loop."""

    def put(self, rollout: Rollout) -> None:
        """Take a finished rollout; raises what an earlier flush failed with."""
        ...

    def flush(self, wait: bool = False) -> None:
        """Ask for what is buffered to be stored now; with ``wait``, return when it is durable."""
        ...

    def put_part(self, part: RolloutPart) -> bool:
        """Take a part of a rollout that goes on, to be durable soon; never waits.

        False if too much is waiting to be stored: then nothing is taken and a longer part may be put later.
        """
        ...

    def parts(self, request: RolloutRequest) -> tuple[RolloutPart, ...]:
        """The parts that earlier workers left of a leased request, in order; () if they cannot be read."""
        ...

    def give_up_parts(self, request: RolloutRequest) -> None:
        """Say that a rollout starts anew; the parts of the attempt so far are kept for analysis."""
        ...


class PolicyFeed(Protocol):
    """Announces policy versions and brings their weights."""

    def newest(self) -> int | None:
        """The newest published version, or None before the first."""
        ...

    def fetch(self, version: int) -> Path:
        """A local Hugging Face folder whose hashes were checked."""
        ...


@dataclass(frozen=True)
class Batch:
    """What one update trains on."""

    step: int
    rollouts: tuple[Rollout, ...]
    baselines: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Earlier rewards that running-mean advantages need, oldest first, by trajectory id of segment 0."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Rollouts refused while this batch was collected, by reason."""
    rewound: frozenset[str] = frozenset()
    """Trajectory ids of segment 0 of rollouts that a rewind made ready again: never refused for age."""
    ready: int = 0
    """Rollouts that were ready beyond this batch."""


class TasksOver(Exception):
    """All tasks were asked as often as they should be, and every rollout of them is used."""


class BatchSource(Protocol):
    """Where the learner gets complete rollouts."""

    def claim(self, step: int) -> Batch | None:
        """The oldest ready rollouts for this step (the same ones if asked again), or None if too few.

        Fewer than a batch only as the last ones of all; after those, raises :class:`TasksOver`.
        """
        ...

    def collected(self, purpose: Purpose) -> int:
        """How many rollouts of a purpose that no update consumes are stored."""
        ...

    def read(self, purpose: Purpose) -> list[Rollout]:
        """All stored rollouts of a purpose that no update consumes."""
        ...

    def policy_steps(self) -> Mapping[int, int]:
        """Version → step of the policy (for a superseded one, of its last surviving ancestor)."""
        ...


@dataclass(frozen=True)
class UpdateRecord:
    """What one step did, as it is committed."""

    step: int
    version_before: int
    version_after: int
    metrics: Mapping[str, float]
    trained: tuple[str, ...]
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Trajectory id → reason, for rollouts of the batch that were not trained on."""
    tokens: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Trajectory id → per-token columns that the learner saw (for the viewer and for replay)."""


class UpdateSink(Protocol):
    """Where the learner's results go, each call durable when it returns."""

    def publish_initial(self, folder: Path, step: int) -> int:
        """Store a policy folder and announce it; returns its version."""
        ...

    def commit(self, record: UpdateRecord, policy_folder: Path | None) -> None:
        """Store the policy (if it changed), then commit the step and announce the version in one transaction."""
        ...

    def next_version(self) -> int:
        """The version number that a new policy gets; numbers only grow."""
        ...

    def checkpoint(self, step: int, folder: Path) -> None:
        """Store a complete checkpoint from ``folder``, manifest last; may return before it is durable."""
        ...

    def flush(self) -> None:
        """Wait until every checkpoint asked for is stored."""
        ...

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint as a local folder, hashes checked."""
        ...
