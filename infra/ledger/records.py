"""What goes into the ledger and comes out of it, as frozen records; no SQL here.

Times are seconds since 1970 (UTC) by the database's clock. Numbers of requests, steps and versions are per run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sao_core.trajectory import Outcome, Purpose, Sampling, Trajectory

TRAINING = (Purpose.TRAIN, Purpose.FEEDBACK)
"""Purposes whose rollouts an update consumes; back-pressure counts these."""


class LedgerError(RuntimeError):
    """The ledger refused: the message names the run, the rule and the way out."""


class LedgerRefused(LedgerError):
    """The database answers and does not let us in, or cannot be opened: waiting does not help."""


class UnknownRun(LedgerError):
    """No run of that id."""


class Fenced(LedgerError):
    """The caller belongs to an earlier attempt of the run, or another process holds its name: it must stop."""


class LedgerTooNew(LedgerError):
    """The database was written by a newer version of this code."""


class RunStatus(StrEnum):
    """How a training run stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


class RequestState(StrEnum):
    """Where a request stands; DONE, EXHAUSTED and CANCELLED are final."""

    PENDING = "pending"
    LEASED = "leased"
    DONE = "done"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"


class TrajectoryState(StrEnum):
    """Where a recorded trajectory stands; KEPT is for purposes that no update consumes."""

    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    REJECTED = "rejected"
    KEPT = "kept"


@dataclass(frozen=True)
class NewRequest:
    """A rollout to ask for. All members of a group are issued in one call and share ``group``."""

    purpose: Purpose
    prompt_key: str
    group: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    policy_version: int | None = None
    """Evaluation pins the version to use; training takes the newest."""


@dataclass(frozen=True)
class RunRecord:
    """One training run."""

    run_id: str
    recipe: str
    algorithm: str
    status: RunStatus
    config: Mapping[str, Any]
    created_at: float
    ended_at: float | None
    message: str
    attempt: int
    """1 for the first start, one more for each resume; fences off processes of earlier attempts."""
    mlflow_run_id: str | None
    prefect_flow_run_id: str | None
    step: int
    """Last surviving step; 0 before the first update."""


@dataclass(frozen=True)
class ConfigChangeRecord:
    """A setting that a resume changed."""

    attempt: int
    step: int
    """Of the checkpoint from which the run went on."""
    setting: str
    old: Any
    new: Any
    changed_at: float


@dataclass(frozen=True)
class TrajectoryRow:
    """One stored trajectory (a segment of a rollout) as the ledger describes it."""

    trajectory_id: str
    run_id: str
    request_number: int
    attempt: int
    segment: int
    num_segments: int
    purpose: Purpose
    prompt_key: str
    group: int | None
    difficulty: str
    object_key: str
    """Relative to the object store."""
    object_row: int
    sha256: str
    """Of the row's arrays: see :func:`infra.trajectory_store.row_sha256`."""
    num_tokens: int
    num_action_tokens: int
    num_turns: int
    score: float
    outcome: Outcome
    stop_reason: str
    version_min: int
    version_max: int
    greedy: bool = False
    state: TrajectoryState = TrajectoryState.READY
    reject_reason: str | None = None
    claimed_step: int | None = None
    trained_step: int | None = None
    rewound: int = 0
    """How often a rewind made it ready again; such rollouts are never refused for age."""
    recorded_at: float = 0.0
    duration_s: float | None = None
    """Of the whole rollout, from its reset on."""
    environment_version: str | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, object_key: str, object_row: int, sha256: str) -> TrajectoryRow:
        """Describe ``trajectory``, which is stored as row ``object_row`` of ``object_key``."""
        return cls(
            trajectory_id=trajectory.trajectory_id,
            run_id=trajectory.run_id,
            request_number=trajectory.request_number,
            attempt=trajectory.attempt,
            segment=trajectory.segment,
            num_segments=trajectory.num_segments,
            purpose=trajectory.purpose,
            prompt_key=trajectory.prompt_key,
            group=trajectory.group,
            difficulty=trajectory.difficulty,
            object_key=object_key,
            object_row=object_row,
            sha256=sha256,
            num_tokens=trajectory.num_tokens,
            num_action_tokens=trajectory.num_action_tokens,
            num_turns=trajectory.num_turns,
            score=trajectory.score,
            outcome=trajectory.outcome,
            stop_reason=trajectory.stop_reason,
            version_min=trajectory.version_min,
            version_max=trajectory.version_max,
            greedy=trajectory.sampling.greedy,
            duration_s=trajectory.timings.get("duration_s"),
            environment_version=trajectory.environment_version,
        )


@dataclass(frozen=True)
class Notable:
    """Rollouts of an evaluation that are worth a look: sampled ones, the first segment of each."""

    best: tuple[TrajectoryRow, ...]
    """Highest score first; of equal ones the longest."""
    worst: tuple[TrajectoryRow, ...]
    """Lowest score first; of equal ones the shortest. None is among the best too."""
    typical: TrajectoryRow | None
    """The one whose score, then length, is closest to the mean; None without any rollout."""


class PartState(StrEnum):
    """Whether a part of an unfinished rollout waits for the rest, or is kept for analysis only."""

    OPEN = "open"
    FAILED = "failed"


@dataclass(frozen=True)
class PartRow:
    """One stored part of an unfinished rollout."""

    request_number: int
    attempt: int
    """That of the worker which holds it: it grows with each lease that goes on from an open part."""
    part: int
    """0, 1, … within the rollout."""
    restorable: bool
    """Whether another worker can go on from here, if this is the newest."""
    object_key: str
    """Relative to the object store."""
    sha256: str
    """Of the object's bytes."""
    num_tokens: int
    num_action_tokens: int
    state: PartState = PartState.OPEN
    worker: str = ""
    recorded_at: float = 0.0


@dataclass(frozen=True)
class NewPolicy:
    """A policy whose files are stored, about to be announced."""

    version: int
    object_key: str
    sha256: str
    """Of the manifest, which holds the sha256 of every file."""


@dataclass(frozen=True)
class PolicyRecord:
    """One published policy version."""

    run_id: str
    version: int
    step: int
    parent_version: int | None
    object_key: str
    sha256: str
    superseded: bool
    published_at: float
    removed_at: float | None
    """When retention removed its files; None while they are there."""


@dataclass(frozen=True)
class UpdateRow:
    """One committed step."""

    step: int
    version_before: int
    version_after: int
    num_trajectories: int
    metrics: Mapping[str, float]
    checkpoint_key: str | None
    committed_at: float
    prompts_issued: int
    """Training prompts issued when the step was committed: its prompt frontier."""


@dataclass(frozen=True)
class CheckpointRecord:
    """One complete checkpoint."""

    step: int
    object_key: str
    sha256: str
    """Of the manifest."""
    created_at: float
    name: str | None = None
    """Retention keeps a named one."""


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of one suite on one policy."""

    number: int
    """Grows with every result of any run; the watermark of tracking."""
    step: int
    version: int
    suite: str
    metrics: Mapping[str, float]
    policy_sha256: str
    created_at: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was made with, as JSON values: see :mod:`infra.evaluations`; empty for those of old versions."""


@dataclass(frozen=True)
class WorkerRecord:
    """A process that serves a run, as its heartbeats describe it."""

    worker: str
    host: str
    pid: int
    state: str
    version: int | None
    purposes: tuple[str, ...]
    heartbeat_at: float
    silent_s: float
    """Seconds since its last heartbeat, by the database's clock."""
    error: str | None


@dataclass(frozen=True)
class Progress:
    """The newest sign that a run gets on: a rollout recorded, a step committed, a policy published."""

    at: float
    kind: str
    idle_s: float = field(compare=False)
    """Seconds since then, by the database's clock."""
