"""Parts of rollouts in the ledger: recorded under a lease, handed on with it, kept or gone with their request."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from infra_fixtures import LEASE_S, group, prompts, row, start_run
from part_fixtures import begin, lease, part_row, states

from infra.ledger import Ledger, LedgerError, PartState, RequestState
from sao_core.trajectory import Outcome, Purpose


def test_a_part_is_recorded_under_its_lease_and_once(ledger: Ledger, run: str) -> None:
    request = begin(ledger, run, True)
    assert ledger.record_part(run, "w", part_row(request))
    assert ledger.record_part(run, "w", part_row(request, 1, restorable=False))
    first, second = ledger.parts(run, request.number, 1, state=PartState.OPEN)
    assert (first.part, first.restorable, first.worker, first.num_tokens) == (0, True, "w", 12)
    assert (second.part, second.restorable, second.object_key) == (1, False, "parts/0-1-1")
    with pytest.raises(LedgerError, match="part 2 comes next, got part 3"):
        ledger.record_part(run, "w", part_row(request, 3))


def test_a_part_of_somebody_elses_rollout_is_refused(ledger: Ledger, run: str) -> None:
    request = begin(ledger, run, lease_s=0.05)
    time.sleep(0.1)
    assert ledger.record_part(run, "w", part_row(request))
    (new,) = lease(ledger, run, "other")
    assert (new.attempt, new.parts) == (2, 1)
    assert not ledger.record_part(run, "w", part_row(request, 1))
    assert not ledger.record_part(run, "w", part_row(replace(request, attempt=2), 1))
    assert ledger.record_part(run, "other", part_row(new, 1))
    assert not ledger.record_part(run, "other", part_row(replace(new, number=77), 0))


def test_whoever_takes_an_expired_lease_gets_the_parts(ledger: Ledger, run: str) -> None:
    begin(ledger, run, False, True, lease_s=0.05)
    time.sleep(0.1)
    (new,) = lease(ledger, run, "other")
    assert new.parts == 2
    assert states(ledger, run) == [(2, 0, PartState.OPEN), (2, 1, PartState.OPEN)]
    assert len(ledger.parts(run, new.number, 2, state=PartState.OPEN)) == 2


@pytest.mark.parametrize("way", ["expired", "dead", "failed"])
def test_parts_from_which_nobody_can_go_on_are_kept_as_failed(ledger: Ledger, run: str, way: str) -> None:
    request = begin(ledger, run, True, False, lease_s=0.05 if way == "expired" else LEASE_S)
    if way == "expired":
        time.sleep(0.1)
    elif way == "dead":
        ledger.expire(run, "w")
    else:
        ledger.fail_attempt(run, "w", request.number, 1, "sandbox lost")
    (new,) = lease(ledger, run, "other")
    assert (new.attempt, new.parts) == (2, 0)
    assert states(ledger, run) == [(1, 0, PartState.FAILED), (1, 1, PartState.FAILED)]
    assert ledger.record_part(run, "other", part_row(new, 0))
    ledger.record(run, "other", [row(new)])
    assert states(ledger, run) == [(1, 0, PartState.FAILED), (1, 1, PartState.FAILED)]


@pytest.mark.parametrize("way", ["release", "resume"])
@pytest.mark.parametrize("restorable", [True, False])
def test_a_lease_that_is_given_back_hands_its_parts_on(ledger: Ledger, run: str, way: str, restorable: bool) -> None:
    begin(ledger, run, restorable)
    if way == "release":
        assert ledger.release(run, "w") == 1
    else:
        ledger.begin_attempt(run)
    (new,) = lease(ledger, run, "other")
    assert (new.attempt, new.parts) == (1, int(restorable))
    assert states(ledger, run) == [(1, 0, PartState.OPEN if restorable else PartState.FAILED)]


def test_parts_of_a_request_that_ends_without_a_record_are_kept_as_failed(ledger: Ledger) -> None:
    run = start_run(ledger, max_attempts=1)
    begin(ledger, run, True)
    ledger.expire(run, "w")
    assert ledger.request_states(run, Purpose.TRAIN) == {RequestState.EXHAUSTED: 1}
    begin(ledger, run, True)
    assert ledger.cancel_requests(run) == 1
    assert [p.state for p in ledger.parts(run)] == [PartState.FAILED] * 2


def test_a_group_that_is_given_up_fails_the_parts_of_all_its_members(ledger: Ledger) -> None:
    run = start_run(ledger, max_attempts=1)
    ledger.issue(run, [*group(0, size=3), *prompts(1)])
    members = lease(ledger, run, "w", count=4)
    for request in members:
        assert ledger.record_part(run, "w", part_row(request))
    ledger.fail_attempt(run, "w", members[0].number, 1, "sandbox lost")
    assert [(p.request_number, p.state) for p in ledger.parts(run)] == [
        (0, PartState.FAILED),
        (1, PartState.FAILED),
        (2, PartState.FAILED),
        (3, PartState.OPEN),
    ]


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.FAILED])
def test_parts_vanish_with_the_record(ledger: Ledger, run: str, outcome: Outcome) -> None:
    request = begin(ledger, run, True, True)
    ledger.issue(run, prompts(1, first=1))
    (other,) = lease(ledger, run)
    ledger.record_part(run, "w", part_row(other))
    assert ledger.record(run, "w", [row(request, outcome=outcome)]) == [f"{run}-0-1-0"]
    assert [(p.request_number, p.state) for p in ledger.parts(run)] == [(other.number, PartState.OPEN)]
    assert ledger.record(run, "w", [row(request, outcome=outcome)]) == [f"{run}-0-1-0"]


def test_a_record_that_is_refused_leaves_the_parts_alone(ledger: Ledger, run: str) -> None:
    request = begin(ledger, run, True, lease_s=0.05)
    time.sleep(0.1)
    lease(ledger, run, "other")
    assert ledger.record(run, "w", [row(request)]) == []
    assert states(ledger, run) == [(2, 0, PartState.OPEN)]


def test_starting_anew_is_for_the_holder_of_the_lease(ledger: Ledger, run: str) -> None:
    begin(ledger, run, True)
    ledger.release(run, "w")
    (new,) = lease(ledger, run, "other")
    ledger.give_up_parts(run, "w", new.number, 1)
    assert states(ledger, run) == [(1, 0, PartState.OPEN)]
    ledger.give_up_parts(run, "other", new.number, 1)
    assert ledger.record_part(run, "other", part_row(new, 0, object_key="anew"))
    assert states(ledger, run) == [(1, 0, PartState.FAILED), (1, 0, PartState.OPEN)]


def test_a_recorded_part_is_progress(ledger: Ledger, run: str) -> None:
    request = begin(ledger, run)
    before = ledger.progress(run)
    time.sleep(0.05)
    ledger.record_part(run, "w", part_row(request))
    after = ledger.progress(run)
    assert (before.kind, after.kind) == ("policy published", "part recorded")
    assert after.at > before.at
