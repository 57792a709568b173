"""Batches and steps: claimed whole, committed at once, undone without loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from infra_fixtures import LEASE_S, TRAIN, group, make, policy, prompts, row, train

from infra.ledger import Fenced, Ledger, LedgerError, NewRequest, RequestState, TrajectoryState
from sao_core.trajectory import Purpose


def test_the_same_trajectory_recorded_twice_counts_once(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    (request,) = ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    assert ledger.record(run, "w", [row(request)]) == ledger.record(run, "w", [row(request)]) != []
    assert ledger.record(run, "w", [row(request, object_key="another")]) == []
    assert ledger.queue(run) == {"pending": 0, "leased": 0, "ready": 1, "claimed": 0}


def test_a_rollout_is_recorded_with_all_its_segments_or_not_at_all(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    (request,) = ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    rows = [row(request, trajectory_id=f"{run}-s{i}", segment=i, num_segments=3) for i in range(3)]
    with pytest.raises(LedgerError, match="all 3 segments"):
        ledger.record(run, "w", rows[:2])
    assert len(ledger.record(run, "w", rows)) == 3
    assert ledger.outstanding(run) == 1
    assert [r.segment for r in ledger.claim(run, 1, 1)] == [0, 1, 2]


def test_a_claim_takes_what_has_been_ready_longest_and_only_a_full_batch(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(4))
    requests = ledger.lease(run, "w", TRAIN, 4, LEASE_S)
    for request in reversed(requests[1:]):
        ledger.record(run, "w", [row(request)])
    assert not ledger.can_claim(run, 1, 4)
    assert ledger.claim(run, 1, 4) == []
    assert ledger.queue(run)["ready"] == 3
    assert [r.request_number for r in ledger.claim(run, 1, 2)] == [2, 3]
    assert [r.request_number for r in ledger.claim(run, 1, 2)] == [2, 3]
    assert ledger.queue(run)["claimed"] == 2


def test_only_whole_groups_are_claimed(ledger: Ledger, run: str) -> None:
    ledger.issue(run, [*group(0, size=2), *group(1, size=2)])
    requests = ledger.lease(run, "w", TRAIN, 4, LEASE_S)
    ledger.record(run, "w", [row(requests[0]), row(requests[3])])
    assert ledger.claim(run, 1, 2) == []
    ledger.record(run, "w", [row(requests[2])])
    assert [r.request_number for r in ledger.claim(run, 1, 2)] == [2, 3]


def test_rollouts_of_other_purposes_are_kept_and_never_claimed(ledger: Ledger, run: str) -> None:
    ledger.issue(run, [NewRequest(Purpose.VALUE_PRETRAIN, f"p{i}") for i in range(2)])
    ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=0)])
    make(ledger, run, 9, purposes=list(Purpose))
    assert ledger.claim(run, 1, 1) == []
    assert ledger.num_rollouts(run, Purpose.VALUE_PRETRAIN) == 2
    assert [r.prompt_key for r in ledger.kept(run, Purpose.VALUE_PRETRAIN)] == ["p0", "p1"]
    assert [r.prompt_key for r in ledger.evaluation_rows(run, 0)] == ["held-out"]
    assert ledger.trajectories(run, Purpose.EVALUATE, version=0) == ledger.evaluation_rows(run, 0)
    assert ledger.evaluation_rows(run, 1) == []


def test_a_step_commits_whole_and_only_once(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(4))
    make(ledger, run, 4)
    ids = [r.trajectory_id for r in ledger.claim(run, 1, 2)]
    commit = (run, 1, 0, 1, {"reward/mean": 0.5, "value/loss": math.nan}, ids, {}, policy(1))
    assert ledger.commit_update(*commit) is True
    assert ledger.commit_update(*commit) is False
    (update,) = ledger.updates_since(run, 0)
    assert (update.step, update.version_before, update.version_after, update.num_trajectories) == (1, 0, 1, 2)
    assert update.metrics["reward/mean"] == 0.5
    assert math.isnan(update.metrics["value/loss"])
    assert update.prompts_issued == 4
    assert ledger.newest_policy(run).version == 1
    assert ledger.last_update(run) == update
    trained = ledger.trajectories(run, states=[TrajectoryState.TRAINED])
    assert [(r.trajectory_id, r.trained_step) for r in trained] == [(name, 1) for name in ids]
    assert ledger.trajectories(run, step=1) == trained
    with pytest.raises(LedgerError, match="committed already"):
        ledger.claim(run, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 3}, "comes step 2"),
        ({"trained": []}, "neither trained nor rejected"),
        ({"trained": ["stranger"]}, "was not claimed"),
        ({"version_before": 9}, "not there"),
        ({"version_after": 5}, "ends with policy version 2"),
        ({"policy": policy(3), "version_after": 3}, "next policy version .* is 2"),
    ],
)
def test_a_step_that_does_not_add_up_changes_nothing(
    ledger: Ledger, run: str, change: dict[str, object], message: str
) -> None:
    ledger.issue(run, prompts(4))
    make(ledger, run, 4)
    train(ledger, run, 1, 2)
    ids = [r.trajectory_id for r in ledger.claim(run, 2, 2)]
    step = {
        "step": 2,
        "version_before": 1,
        "version_after": 2,
        "metrics": {},
        "trained": ids,
        "rejected": {},
        "policy": policy(2),
    }
    with pytest.raises(LedgerError, match=message):
        ledger.commit_update(run, **(step | change))
    assert ledger.last_step(run) == 1
    assert ledger.next_version(run) == 2
    assert ledger.queue(run)["claimed"] == 2
    assert ledger.commit_update(run, **step)


def test_a_critic_only_step_keeps_the_version(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    make(ledger, run, 1)
    ledger.claim(run, 1, 1)
    assert ledger.commit_update(run, 1, 0, 0, {}, [f"{run}-0-1-0"], {}, None)
    assert (ledger.last_step(run), ledger.next_version(run)) == (1, 1)


def test_a_rejected_rollout_is_reissued_when_its_step_commits(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    make(ledger, run, 2)
    rows = ledger.claim(run, 1, 2)
    ledger.commit_update(run, 1, 0, 1, {}, [rows[0].trajectory_id], {rows[1].trajectory_id: "stale"}, policy(1))
    assert ledger.rejected_since(run, 0.0) == {"stale": 1}
    assert ledger.outstanding(run) == 1
    assert [(r.number, r.attempt) for r in ledger.lease(run, "w", TRAIN, 9, LEASE_S)] == [(1, 2)]


def test_a_rejected_member_of_a_trained_group_is_counted_but_not_reissued(ledger: Ledger, run: str) -> None:
    ledger.issue(run, group(0, size=2))
    make(ledger, run, 2)
    rows = ledger.claim(run, 1, 2)
    ledger.commit_update(run, 1, 0, 1, {}, [rows[0].trajectory_id], {rows[1].trajectory_id: "stale"}, policy(1))
    assert ledger.request_states(run, Purpose.TRAIN) == {RequestState.DONE: 2}
    assert ledger.outstanding(run) == 0


def test_a_damaged_claim_is_reissued_and_its_group_waits_for_it(ledger: Ledger, run: str) -> None:
    ledger.issue(run, group(0, size=2))
    make(ledger, run, 2)
    rows = ledger.claim(run, 1, 2)
    ledger.reject_claimed(run, 1, {rows[0].trajectory_id: "object damaged: runs/…"})
    assert ledger.queue(run) == {"pending": 1, "leased": 0, "ready": 1, "claimed": 0}
    assert ledger.claim(run, 1, 2) == []
    make(ledger, run, 1)
    assert [(r.request_number, r.attempt) for r in ledger.claim(run, 1, 2)] == [(0, 2), (1, 1)]
    assert ledger.rejected_since(run, 0.0) == {"object_damaged": 1}


def test_rewind_makes_later_rollouts_ready_again_and_each_counts_once(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(10))
    make(ledger, run, 8)
    for step in (1, 2, 3):
        train(ledger, run, step, 2)
    ledger.claim(run, 4, 2)
    ledger.set_checkpoint(run, 1, "checkpoints/1", "1" * 64)
    ledger.set_checkpoint(run, 3, "checkpoints/3", "3" * 64)
    ledger.rewind(run, 1)
    ledger.rewind(run, 1)
    assert ledger.last_step(run) == 1
    assert ledger.queue(run) == {"pending": 2, "leased": 0, "ready": 6, "claimed": 0}
    assert ledger.newest_policy(run).version == 1
    assert ledger.latest_checkpoint(run).step == 1
    assert ledger.superseded_steps(run) == [2, 3]
    assert {r.rewound for r in ledger.trajectories(run, states=[TrajectoryState.READY])} == {1}
    assert ledger.next_version(run) == 4
    assert train(ledger, run, 2, 2) == [f"{run}-2-1-0", f"{run}-3-1-0"]
    assert [(u.step, u.version_before, u.version_after) for u in ledger.updates_since(run, 0)] == [(1, 0, 1), (2, 1, 4)]
    assert ledger.policy_steps(run) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 2}
    assert ledger.policy_steps(run, since_version=3) == {3: 1, 4: 2}
    assert len({r.request_number for r in ledger.trajectories(run, states=[TrajectoryState.TRAINED])}) == 4


def test_rewind_refuses_a_step_that_was_never_reached(ledger: Ledger, run: str) -> None:
    with pytest.raises(LedgerError, match="last one is 0"):
        ledger.rewind(run, 1)


def test_a_learner_of_an_earlier_attempt_can_change_nothing(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    make(ledger, run, 2)
    (claimed,) = ledger.claim(run, 1, 1, attempt=1)
    assert ledger.begin_attempt(run) == 2
    assert ledger.queue(run)["ready"] == 2
    with pytest.raises(Fenced, match="must stop"):
        ledger.commit_update(run, 1, 0, 1, {}, [claimed.trajectory_id], {}, policy(1), attempt=1)
    for call in (
        lambda: ledger.claim(run, 1, 1, attempt=1),
        lambda: ledger.rewind(run, 0, attempt=1),
        lambda: ledger.add_policy(run, policy(1), 0, attempt=1),
        lambda: ledger.set_checkpoint(run, 0, "k", "0" * 64, attempt=1),
    ):
        with pytest.raises(Fenced):
            call()


def test_workers_wait_for_a_policy_of_this_attempt(ledger: Ledger, run: str) -> None:
    assert ledger.newest_policy(run, announced=True).version == 0
    ledger.begin_attempt(run)
    assert ledger.newest_policy(run, announced=True) is None
    assert ledger.newest_policy(run).version == 0
    ledger.announce(run, 0)
    assert ledger.newest_policy(run, announced=True).version == 0


def test_running_means_read_only_what_the_surviving_weights_were_trained_on(ledger: Ledger, run: str) -> None:
    for _ in range(3):
        ledger.issue(run, prompts(2))
    requests = ledger.lease(run, "w", TRAIN, 6, LEASE_S)
    for request in requests:
        ledger.record(run, "w", [row(request, score=float(request.number))])
    assert ledger.recent_rewards(run, 9) == ()
    train(ledger, run, 1, 2)
    train(ledger, run, 2, 2)
    assert ledger.recent_rewards(run, 3) == (1.0, 2.0, 3.0)
    assert ledger.prompt_rewards(run, ["prompt-0", "prompt-1", "new"], 8) == {
        "prompt-0": (0.0, 2.0),
        "prompt-1": (1.0, 3.0),
        "new": (),
    }
    ledger.rewind(run, 1)
    assert ledger.recent_rewards(run, 9) == (0.0, 1.0)


def test_checkpoints_beyond_the_newest_are_forgotten(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(3))
    make(ledger, run, 3)
    ledger.set_checkpoint(run, 0, "checkpoints/0", "0" * 64)
    for step in (1, 2, 3):
        train(ledger, run, step, 1)
        ledger.set_checkpoint(run, step, f"checkpoints/{step}", "0" * 64)
    assert [r.step for r in ledger.remove_checkpoints(run, keep=2)] == [1, 0]
    assert [r.step for r in ledger.checkpoints(run)] == [3, 2]
    keys = [u.checkpoint_key for u in ledger.updates_since(run, 0)]
    assert keys == [None, "checkpoints/2", "checkpoints/3"]
    with pytest.raises(LedgerError, match="committed first"):
        ledger.set_checkpoint(run, 4, "checkpoints/4", "0" * 64)


def test_an_evaluation_is_reported_once(ledger: Ledger, run: str) -> None:
    ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=0)])
    assert ledger.unreported_evaluations(run) == [0]
    assert ledger.add_evaluation(run, 0, 0, "calculator", {"reward_mean": 0.4}, "0" * 64)
    assert not ledger.add_evaluation(run, 0, 0, "calculator", {"reward_mean": 0.9}, "0" * 64)
    assert ledger.unreported_evaluations(run) == []
    (result,) = ledger.evaluations(run)
    assert (result.version, result.metrics, result.policy_sha256) == (0, {"reward_mean": 0.4}, "0" * 64)
    assert ledger.evaluations(run, after=result.number) == []


def test_lengths_tell_what_was_used_of_what_was_settled(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(3))
    requests = ledger.lease(run, "w", TRAIN, 3, LEASE_S)
    ledger.record(run, "w", [replace(row(r), num_action_tokens=10 * (r.number + 1)) for r in requests])
    rows = ledger.claim(run, 1, 2)
    ledger.commit_update(run, 1, 0, 1, {}, [rows[0].trajectory_id], {rows[1].trajectory_id: "stale"}, policy(1))
    assert sorted(ledger.lengths(run)) == [(10, True), (20, False)]


def test_after_a_rewind_nothing_new_is_generated_until_what_is_ready_is_within_the_bound(
    ledger: Ledger, run: str
) -> None:
    """Else rollouts for later steps would be sampled from a policy that those steps have long left behind."""
    ledger.issue(run, prompts(6))
    make(ledger, run, 4)
    for step in (1, 2):
        train(ledger, run, step, 2)
    ledger.rewind(run, 0)
    assert ledger.lease(run, "w", TRAIN, 6, LEASE_S, window=2) == []
    train(ledger, run, 1, 2)
    assert ledger.lease(run, "w", TRAIN, 6, LEASE_S, window=2) == []
    train(ledger, run, 2, 2)
    assert [request.number for request in ledger.lease(run, "w", TRAIN, 6, LEASE_S, window=2)] == [4, 5]


def test_the_bound_after_a_rewind_never_keeps_a_batch_from_filling(ledger: Ledger, run: str) -> None:
    """A rollout that must be made again comes before those that were issued later, though the bound is used up."""
    ledger.issue(run, prompts(4))
    make(ledger, run, 4)
    train(ledger, run, 1, 2)
    train(ledger, run, 2, 2)
    ledger.rewind(run, 0)
    damaged = ledger.claim(run, 1, 2)[0]
    ledger.reject_claimed(run, 1, {damaged.trajectory_id: "object damaged"})
    again = ledger.lease(run, "w", TRAIN, 4, LEASE_S, window=2)
    assert [(request.number, request.attempt) for request in again] == [(damaged.request_number, 2)]


def test_a_rewound_group_is_whole_again_with_the_member_that_its_step_refused(ledger: Ledger, run: str) -> None:
    """Else the rest of the group would be ready for ever, and no batch could take it."""
    ledger.issue(run, group(0))
    make(ledger, run, 4)
    ids = [r.trajectory_id for r in ledger.claim(run, 1, 4)]
    after = ledger.next_version(run)
    ledger.commit_update(run, 1, 0, after, {}, ids[1:], {ids[0]: "stale"}, policy(after))
    assert ledger.rejected_since(run, 0.0, ledger.now() + 1) == {"stale": 1}
    ledger.rewind(run, 0)
    assert ledger.rejected_since(run, 0.0, ledger.now() + 1) == {}
    assert [r.trajectory_id for r in ledger.claim(run, 1, 4)] == ids
    assert train(ledger, run, 1, 4) == ids


def test_a_rewind_leaves_alone_what_was_refused_and_made_again(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    make(ledger, run, 2)
    ids = [r.trajectory_id for r in ledger.claim(run, 1, 2)]
    after = ledger.next_version(run)
    ledger.commit_update(run, 1, 0, after, {}, ids[1:], {ids[0]: "stale"}, policy(after))
    make(ledger, run, 1)
    ledger.rewind(run, 0)
    states = {row.trajectory_id: row.state for row in ledger.trajectories(run)}
    assert states[ids[0]] is TrajectoryState.REJECTED
    assert sorted(states.values()) == ["ready", "ready", "rejected"]
