"""The invariants of the ledger itself: each rule is a function of one snapshot that yields (subject, what is wrong).

    pending ─ lease ─▶ leased ─ record ─▶ done            attempts + 1 with each lease
       ▲                 │  └─ expire, fail, rejected ─▶ pending, or exhausted after max_attempts: a failed attempt
       └──── release ────┘                               attempts − 1: the same attempt is leased again
    pending, leased ─ cancel ─▶ cancelled

A refused rollout reopens its request, except in a group: that was consumed with it, or given up as a whole.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import Row

from infra.ledger import TRAINING, RequestState, RunStatus, TrajectoryState
from infra.verify.snapshot import Snapshot

Problem = tuple[str, str]
"""(id of what is wrong, one sentence with the values)."""
Rule = Callable[[Snapshot], Iterator[Problem]]

REQUEST_STATES = frozenset(RequestState)
TRAJECTORY_STATES = frozenset(TrajectoryState)
OPEN = frozenset({RequestState.PENDING, RequestState.LEASED})
USED = frozenset({TrajectoryState.CLAIMED, TrajectoryState.TRAINED})


def request_state(s: Snapshot) -> Iterator[Problem]:
    """Every number that was issued stands in one known state, and `done` means that its last attempt counts.

    A lease has a worker and an end, exactly while its request is leased. Only a done request has a rollout that counts
    (ready, claimed, trained, kept), and that of its last attempt; a done one without belongs to a group and its
    rollout was refused.
    """
    for number in range(s.run.next_request):
        if number not in s.requests:
            yield f"request {number}", f"it was issued ({s.run.next_request} were), but there is no row of it"
    for number, request in s.requests.items():
        subject, state = f"request {number}", request.state
        if number >= s.run.next_request:
            yield subject, f"only numbers below {s.run.next_request} were issued"
        if state not in REQUEST_STATES:
            yield subject, f"its state `{state}` is unknown"
        lease = (request.lease_worker is not None, request.lease_until is not None)
        if lease != (state == RequestState.LEASED,) * 2:
            yield subject, f"it is {state} with lease worker {request.lease_worker} until {request.lease_until}"
        counting = [attempt for attempt in s.attempts.get(number, ()) if s.counts(number, attempt)]
        if state != RequestState.DONE:
            if counting:
                yield subject, f"it is {state}, though the rollout of its attempt {counting[-1]} counts"
        elif not counting and (request.group_number is None or (number, request.attempts) not in s.rollouts):
            yield subject, f"it is done, but no rollout of its attempt {request.attempts} counts"
        elif counting and counting[-1] != request.attempts:
            yield subject, f"it is done with attempt {request.attempts}, but attempt {counting[-1]} counts"


def attempts(s: Snapshot) -> Iterator[Problem]:
    """Every attempt ends: it failed with a reason, or its rollout counts, or it holds the lease now.

    Attempts stay within `max_attempts`, and an exhausted request used all of them. (A resume may change the bound: then
    each that was in force is allowed.)
    """
    least, most = min(s.max_attempts), max(s.max_attempts)
    for number in sorted((s.attempts.keys() | s.failed_attempts.keys()) - s.requests.keys()):
        yield f"request {number}", "it has attempts, but no row"
    for number, request in s.requests.items():
        subject, made, state = f"request {number}", request.attempts, request.state
        failed = s.failed_attempts.get(number, frozenset())
        if not 0 <= made <= most:
            yield subject, f"it had {made} attempts: rollout.max_attempts is {most}"
        if state == RequestState.EXHAUSTED and made < least:
            yield subject, f"it is exhausted after {made} of {least} attempts"
        if state in (RequestState.LEASED, RequestState.DONE) and made < 1:
            yield subject, f"it is {state} without an attempt"
        if stray := sorted(attempt for attempt in (*failed, *s.attempts.get(number, ())) if not 1 <= attempt <= made):
            yield subject, f"attempt {stray[0]} is on record, but it had {made}"
        settled = {*range(1, made)} | (
            {made} if made and state in (RequestState.PENDING, RequestState.EXHAUSTED) else set()
        )
        if vanished := sorted(settled - failed):
            yield subject, f"attempt {vanished[0]} of {made} vanished: it is {state}, and no failure is on record"
        if made in failed and (state == RequestState.LEASED or s.counts(number, made)):
            what = "holds the lease" if state == RequestState.LEASED else "counts"
            yield subject, f"attempt {made} failed, and yet it {what}"


def recorded_once(s: Snapshot) -> Iterator[Problem]:
    """Every trajectory is in one known state with what belongs to it, and one attempt of a request counts at most.

    A rejected one has a reason, a trained one its step, a claimed one the step that claimed it. The segments of a
    rollout are all there and go together.
    """
    for row in s.trajectories:
        for wrong in _state_problems(row):
            yield row.trajectory_id, wrong
    for (number, attempt), segments in s.rollouts.items():
        subject, first = f"request {number}, attempt {attempt}", segments[0]
        if [row.segment for row in segments] != list(range(first.num_segments)):
            yield subject, f"it has {first.num_segments} segments: got {[row.segment for row in segments]}"
        where = {(row.state, row.claimed_step, row.trained_step, row.num_segments) for row in segments}
        if len(where) > 1:
            yield subject, f"its segments do not stand together: {', '.join(sorted({row.state for row in segments}))}"
        if number not in s.requests:
            yield first.trajectory_id, f"its request {number} does not exist"
    for number, recorded in s.attempts.items():
        counting = [attempt for attempt in recorded if s.counts(number, attempt)]
        if len(counting) > 1:
            yield f"request {number}", f"several of its attempts count: {counting}"


def trained_once(s: Snapshot) -> Iterator[Problem]:
    """What was trained names a surviving step, what is claimed the next one; a group goes whole into one step.

    A refused member stays behind when its group is consumed.
    """
    surviving, following = {row.step for row in s.steps}, s.last_step + 1
    trained: dict[int, set[int]] = defaultdict(set)
    for row in s.trajectories:
        if row.state == TrajectoryState.TRAINED:
            trained[row.request_number].add(row.attempt)
            if row.trained_step not in surviving:
                yield row.trajectory_id, f"it was trained by step {row.trained_step}, which did not survive"
        elif row.state == TrajectoryState.CLAIMED and row.claimed_step != following:
            yield row.trajectory_id, f"it is claimed by step {row.claimed_step}: the next one is {following}"
    for number, by in trained.items():
        if len(by) > 1:
            yield f"request {number}", f"it was trained {len(by)} times, by attempts {sorted(by)}"
    yield from _torn_groups(s)


def step_accounts(s: Snapshot) -> Iterator[Problem]:
    """A surviving step has as many trained trajectories (segments of rollouts) as its row says."""
    trained = Counter(row.trained_step for row in s.trajectories if row.state == TrajectoryState.TRAINED)
    for row in s.steps:
        if trained[row.step] != row.num_trajectories:
            yield f"step {row.step}", f"it trained {row.num_trajectories} trajectories: {trained[row.step]} name it"


def gapless_steps(s: Snapshot) -> Iterator[Problem]:
    """Surviving steps count 1, 2, 3 …, and each starts from the version that the one before it ended with.

    A step that changed the weights ends with its own policy, any other with the version it began with.
    """
    for expected, row in enumerate(s.steps, start=1):
        if row.step != expected:
            yield f"step {row.step}", f"step {expected} is missing before it"
            break
    for before, after in pairwise(s.steps):
        if after.version_before != before.version_after:
            yield (
                f"step {after.step}",
                f"it starts from version {after.version_before}: the step before it ended with {before.version_after}",
            )
    made = {(p.step, p.version) for p in s.policies if not p.superseded}
    for row in s.steps:
        if row.version_after < row.version_before:
            yield f"step {row.step}", f"its version goes back from {row.version_before} to {row.version_after}"
        elif row.version_after > row.version_before and (row.step, row.version_after) not in made:
            yield f"step {row.step}", f"it ended with version {row.version_after}, which is no surviving policy of it"


def gapless_versions(s: Snapshot) -> Iterator[Problem]:
    """Version numbers count 0, 1, 2 …, superseded ones too; the surviving policies are one chain, parent to child.

    A policy of a step was made by that surviving step.
    """
    known = {row.version for row in s.policies}
    for version in sorted(set(range(max(known, default=-1) + 1)) - known):
        yield f"policy {version}", f"there is no such version: the newest is {max(known)}"
    for row in s.policies:
        if row.parent_version is None:
            if row.version != 0:
                yield f"policy {row.version}", "it has no parent: only version 0 has none"
        elif row.parent_version >= row.version or row.parent_version not in known:
            yield f"policy {row.version}", f"its parent is version {row.parent_version}"
    surviving = [row for row in s.policies if not row.superseded]
    for before, after in pairwise(surviving):
        if after.parent_version != before.version:
            yield (
                f"policy {after.version}",
                f"its parent is version {after.parent_version}: the policy before it that survived is {before.version}",
            )
    made_by = {row.version_after: row.step for row in s.steps if row.version_after > row.version_before}
    for row in surviving:
        if row.step > 0 and made_by.get(row.version) != row.step:
            yield (
                f"policy {row.version}",
                f"it is of step {row.step}, but made by step {made_by.get(row.version)}",
            )


def ended_run(s: Snapshot) -> Iterator[Problem]:
    """A run that ended says when; a completed one has nothing open and made its updates, or none at all.

    (None at all: flows that only prepare or evaluate. Fewer: tasks that came to an end.)
    """
    if (s.run.ended_at is None) != (s.run.status == RunStatus.RUNNING):
        yield s.run.run_id, f"it is {s.run.status} and ended at {s.run.ended_at}"
    if s.run.status != RunStatus.COMPLETED:
        return
    for number, request in s.requests.items():
        if request.state in OPEN:
            yield f"request {number}", f"the run is completed, but it is {request.state}"
    for row in s.trajectories:
        if row.state == TrajectoryState.CLAIMED:
            yield row.trajectory_id, f"the run is completed, but it is claimed for step {row.claimed_step}"
    for version in s.unreported:
        yield f"policy {version}", "the run is completed, but the evaluation of this version was not reported"
    wanted = json.loads(s.run.config_json).get("learner", {}).get("updates")
    if wanted is not None and 0 < s.last_step < wanted and not s.tasks_over:
        yield s.run.run_id, f"it is completed after step {s.last_step} of {wanted}"


RULES: Mapping[str, tuple[Rule, Callable[[Snapshot], int]]] = {
    "request-state": (request_state, lambda s: len(s.requests)),
    "attempts": (attempts, lambda s: sum(row.attempts for row in s.requests.values())),
    "recorded-once": (recorded_once, lambda s: len(s.trajectories)),
    "trained-once": (trained_once, lambda s: sum(row.state in USED for row in s.trajectories)),
    "step-accounts": (step_accounts, lambda s: len(s.steps)),
    "gapless-steps": (gapless_steps, lambda s: len(s.steps)),
    "gapless-versions": (gapless_versions, lambda s: len(s.policies)),
    "ended-run": (ended_run, lambda s: int(s.run.status != RunStatus.RUNNING)),
}
"""Name → (the rule, how many things it looks at)."""


def _state_problems(row: Row[Any]) -> Iterator[str]:
    """What of a trajectory's columns does not go with its state."""
    state = row.state
    if state not in TRAJECTORY_STATES:
        yield f"its state `{state}` is unknown: it is lost"
        return
    if (state == TrajectoryState.REJECTED) != (row.reject_reason is not None):
        yield f"it is {state} with the reason {row.reject_reason}"
    if (state == TrajectoryState.TRAINED) != (row.trained_step is not None):
        yield f"it is {state} with trained step {row.trained_step}"
    if state == TrajectoryState.TRAINED and row.claimed_step != row.trained_step:
        yield f"step {row.claimed_step} claimed it, step {row.trained_step} trained it"
    if state == TrajectoryState.CLAIMED and row.claimed_step is None:
        yield "it is claimed, by no step"
    if state in (TrajectoryState.READY, TrajectoryState.KEPT) and row.claimed_step is not None:
        yield f"it is {state}, though step {row.claimed_step} claimed it"
    if state != TrajectoryState.REJECTED and (state == TrajectoryState.KEPT) == (row.purpose in TRAINING):
        yield f"it is {state} for the purpose {row.purpose}"


def _torn_groups(s: Snapshot) -> Iterator[Problem]:
    groups: dict[int, list[Row[Any]]] = defaultdict(list)
    for request in s.requests.values():
        if request.group_number is not None:
            groups[request.group_number].append(request)
    for group, members in groups.items():
        rollouts = [s.rollouts.get((member.number, member.attempts)) for member in members]
        used = {way for segments in rollouts if (way := _used(segments)) is not None}
        if not used:
            continue
        if len(used) > 1:
            yield f"group {group}", f"its rollouts went different ways: {', '.join(sorted(used))}"
        if len(members) != members[0].group_size:
            yield f"group {group}", f"it has {members[0].group_size} members: {len(members)} were issued"
        for member, segments in zip(members, rollouts, strict=True):
            refused = segments is not None and segments[0].state == TrajectoryState.REJECTED
            if _used(segments) is None and not refused:
                state = "not recorded" if segments is None else segments[0].state
                yield f"request {member.number}", f"its group {group} went into a step, but its rollout is {state}"


def _used(segments: Sequence[Row[Any]] | None) -> str | None:
    """How a step has a rollout that it claimed or trained."""
    if segments is None or segments[0].state not in USED:
        return None
    return f"{segments[0].state} by step {segments[0].claimed_step}"
