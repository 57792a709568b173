"""Requests: issued without gaps, leased once, fenced, reissued, exhausted."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from infra_fixtures import LEASE_S, TRAIN, group, make, prompts, row, start_run

from infra.ledger import Fenced, Ledger, LedgerError, NewRequest, RequestState, TrajectoryState, UnknownRun
from sao_core.trajectory import Outcome, Purpose, Sampling


def test_request_numbers_are_gapless_over_all_purposes(ledger: Ledger, run: str) -> None:
    assert ledger.issue(run, prompts(3)) == [0, 1, 2]
    evaluate = [NewRequest(Purpose.EVALUATE, "held-out", sampling=Sampling(greedy=True), policy_version=0)]
    assert ledger.issue(run, evaluate) == [3]
    assert ledger.issue(run, prompts(2, first=3)) == [4, 5]
    assert ledger.prompts_issued(run) == 5
    assert ledger.prompts_issued(run, Purpose.EVALUATE) == 1


def test_a_group_counts_as_one_prompt(ledger: Ledger, run: str) -> None:
    ledger.issue(run, [*group(0), *group(1)])
    assert ledger.prompts_issued(run) == 2
    assert ledger.outstanding(run) == 8


def test_issuing_twice_from_the_same_frontier_issues_once(ledger: Ledger, run: str) -> None:
    assert ledger.issue(run, prompts(2), frontier=0) == [0, 1]
    assert ledger.issue(run, prompts(2), frontier=0) == []
    assert ledger.issue(run, prompts(1, first=2), frontier=2) == [2]


def test_a_failed_issue_leaves_no_gap(ledger: Ledger, run: str) -> None:
    with pytest.raises(LedgerError, match="policy version 7"):
        ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=7)])
    with pytest.raises(UnknownRun):
        ledger.issue("nobody", prompts(1))
    assert ledger.issue(run, prompts(1)) == [0]


def test_a_group_cannot_be_issued_in_parts(ledger: Ledger, run: str) -> None:
    ledger.issue(run, group(5, size=2))
    with pytest.raises(LedgerError, match="group 5"):
        ledger.issue(run, group(5, size=2))


def test_leases_are_exclusive_and_oldest_first(ledger: Ledger, run: str) -> None:
    sampling = Sampling(temperature=0.7)
    ledger.issue(run, prompts(5, sampling=sampling))
    first = ledger.lease(run, "a", TRAIN, 3, LEASE_S)
    second = ledger.lease(run, "b", TRAIN, 3, LEASE_S)
    assert [r.number for r in first] == [0, 1, 2]
    assert [r.number for r in second] == [3, 4]
    assert {(r.attempt, r.sampling) for r in first + second} == {(1, sampling)}
    assert first[1].prompt_key == "prompt-1"


def test_a_worker_leases_only_its_purposes_and_version(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=0)])
    assert ledger.lease(run, "e", [Purpose.EVALUATE], 9, LEASE_S, version=1) == []
    assert [r.policy_version for r in ledger.lease(run, "e", [Purpose.EVALUATE], 9, LEASE_S, version=0)] == [0]
    assert [r.number for r in ledger.lease(run, "t", TRAIN, 9, LEASE_S)] == [0]


def test_an_expired_lease_is_retaken_as_the_next_attempt_and_its_old_holder_is_fenced_off(
    ledger: Ledger, run: str
) -> None:
    ledger.issue(run, prompts(1))
    (old,) = ledger.lease(run, "slow", TRAIN, 1, 0.05)
    time.sleep(0.1)
    assert ledger.record(run, "slow", [row(old)]) == []
    (new,) = ledger.lease(run, "fast", TRAIN, 1, LEASE_S)
    assert (new.number, new.attempt) == (0, 2)
    assert ledger.record(run, "slow", [row(old)]) == []
    assert ledger.record(run, "fast", [row(new)]) == [f"{run}-0-2-0"]
    assert ledger.record(run, "slow", [row(old)]) == []
    assert ledger.counts(run)["trajectories"] == {"train": {"ready": 1}}
    assert ledger.rejected_since(run, 0.0) == {"lease_expired": 1}


def test_a_heartbeat_renews_leases(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    requests = ledger.lease(run, "w", TRAIN, 2, 0.3)
    for _ in range(4):
        time.sleep(0.15)
        assert ledger.heartbeat(run, "w", "generating", 0, "host", 1, 0.3) == [0, 1]
    assert len(ledger.record(run, "w", [row(r) for r in requests])) == 2


def test_a_lease_whose_answer_was_lost_is_left_to_run_out(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    ledger.lease(run, "w", TRAIN, 2, 0.05)
    time.sleep(0.1)
    assert ledger.heartbeat(run, "w", "generating", 0, "host", 1, LEASE_S, holding=[1]) == [1]
    assert [r.number for r in ledger.lease(run, "other", TRAIN, 2, LEASE_S)] == [0]


def test_a_worker_name_belongs_to_one_process(ledger: Ledger, run: str) -> None:
    ledger.heartbeat(run, "rollout-0", "starting", None, "host", 10, LEASE_S, purposes=TRAIN)
    ledger.heartbeat(run, "rollout-0", "generating", 3, "host", 10, LEASE_S, purposes=TRAIN)
    with pytest.raises(Fenced, match="rollout-0"):
        ledger.heartbeat(run, "rollout-0", "starting", None, "host", 11, LEASE_S, purposes=TRAIN)
    (worker,) = ledger.workers(run)
    assert (worker.state, worker.version, worker.pid, worker.purposes) == ("generating", 3, 10, ("train",))
    assert 0 <= worker.silent_s < 5


def test_released_leases_cost_no_attempt(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    for _ in range(5):
        (request,) = ledger.lease(run, "w", TRAIN, 1, LEASE_S)
        assert request.attempt == 1
        assert ledger.release(run, "w") == 1
    assert ledger.record(run, "w", [row(request)]) == []


def test_a_failed_attempt_is_reissued_until_max_attempts_then_exhausted(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    assert ledger.fail_attempt(run, "w", 0, 1, "sandbox lost: timeout") is RequestState.PENDING
    assert ledger.fail_attempt(run, "w", 0, 1, "sandbox lost: timeout") is RequestState.PENDING
    ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    assert ledger.fail_attempt(run, "w", 0, 2, "sandbox lost: again") is RequestState.EXHAUSTED
    assert ledger.lease(run, "w", TRAIN, 1, LEASE_S) == []
    assert ledger.outstanding(run) == 0
    assert ledger.rejected_since(run, 0.0) == {"sandbox_lost": 2}


def test_a_lease_that_expires_too_often_exhausts_its_request(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    for worker in ("a", "b"):
        assert len(ledger.lease(run, worker, TRAIN, 1, 0.0)) == 1
    assert ledger.lease(run, "c", TRAIN, 1, LEASE_S) == []
    assert ledger.request_states(run, Purpose.TRAIN) == {RequestState.EXHAUSTED: 1}


def test_a_dead_workers_leases_can_be_taken_back_at_once(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    ledger.lease(run, "dead", TRAIN, 1, LEASE_S)
    ledger.lease(run, "alive", TRAIN, 1, LEASE_S)
    assert ledger.expire(run, "dead") == 1
    assert [(r.number, r.attempt) for r in ledger.lease(run, "new", TRAIN, 9, LEASE_S)] == [(0, 2)]


def test_one_exhausted_member_rejects_its_group(ledger: Ledger, run: str) -> None:
    ledger.issue(run, [*group(0, size=4), *group(1, size=2)])
    requests = ledger.lease(run, "w", TRAIN, 3, LEASE_S)
    ledger.record(run, "w", [row(requests[0])])
    for attempt in (1, 2):
        ledger.fail_attempt(run, "w", 1, attempt, "crash")
        ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    states = {r.request_number: (r.state, r.reject_reason) for r in ledger.trajectories(run)}
    assert states == {0: (TrajectoryState.REJECTED, "group_exhausted")}
    assert ledger.request_states(run, Purpose.TRAIN) == {
        RequestState.DONE: 1,
        RequestState.EXHAUSTED: 1,
        RequestState.CANCELLED: 2,
        RequestState.PENDING: 1,
        RequestState.LEASED: 1,
    }
    assert ledger.record(run, "w", [row(requests[2])]) == []
    assert ledger.outstanding(run) == 2


def test_a_failed_rollout_is_recorded_as_rejected_and_reissued(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(1))
    (request,) = ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    failed = replace(row(request), outcome=Outcome.FAILED, stop_reason="environment error: boom")
    assert ledger.record(run, "w", [failed]) == [failed.trajectory_id]
    assert ledger.record(run, "w", [failed]) == [failed.trajectory_id]
    (again,) = ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    assert again.attempt == 2
    assert ledger.record(run, "w", [row(again)]) == [f"{run}-0-2-0"]
    states = [(r.attempt, r.state, r.reject_reason) for r in ledger.trajectories(run)]
    assert states == [(1, TrajectoryState.REJECTED, "environment_error"), (2, TrajectoryState.READY, None)]
    assert ledger.rejected_since(run, 0.0) == {"environment_error": 1}


def test_starting_again_gives_leases_back_and_fences_earlier_workers(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    (request,) = ledger.lease(run, "old", TRAIN, 1, LEASE_S, attempt=1)
    assert ledger.begin_attempt(run) == 2
    with pytest.raises(Fenced):
        ledger.lease(run, "old", TRAIN, 1, LEASE_S, attempt=1)
    assert ledger.record(run, "old", [row(request)]) == []
    again = ledger.lease(run, "new", TRAIN, 1, LEASE_S, attempt=2)
    assert [(r.number, r.attempt) for r in again] == [(0, 1)]


def test_max_attempts_follows_the_configuration_of_a_resume(ledger: Ledger) -> None:
    run = start_run(ledger, max_attempts=1)
    ledger.change_config(run, {"rollout": {"max_attempts": 3}}, {}, attempt=1)
    ledger.issue(run, prompts(1))
    ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    assert ledger.fail_attempt(run, "w", 0, 1, "crash") is RequestState.PENDING


def test_cancelling_ends_what_is_open(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(3))
    make(ledger, run, 1)
    (leased,) = ledger.lease(run, "w", TRAIN, 1, LEASE_S)
    assert ledger.cancel_requests(run) == 2
    assert ledger.record(run, "w", [row(leased)]) == []
    assert ledger.request_states(run, Purpose.TRAIN) == {RequestState.DONE: 1, RequestState.CANCELLED: 2}
