"""Policies: announced in order, removed only when nothing can need them."""

from __future__ import annotations

import pytest
from infra_fixtures import LEASE_S, TRAIN, make, policy, prompts, train

from infra.ledger import Ledger, LedgerError, NewRequest
from sao_core.trajectory import Purpose


def versions_after(ledger: Ledger, run: str, steps: int) -> None:
    ledger.issue(run, prompts(steps))
    make(ledger, run, steps)
    for step in range(1, steps + 1):
        train(ledger, run, step, 1)


def removed(ledger: Ledger, run: str, keep: int = 2, silent_s: float = 60.0) -> list[int]:
    return sorted(record.version for record in ledger.remove_policies(run, keep, silent_s))


def beat(
    ledger: Ledger, run: str, name: str, version: int | None, state: str = "generating", *, purposes=TRAIN
) -> None:
    ledger.heartbeat(run, name, state, version, "host", 1, LEASE_S, purposes=purposes)


def test_versions_only_grow(ledger: Ledger, run: str) -> None:
    with pytest.raises(LedgerError, match="is 1: got 0"):
        ledger.add_policy(run, policy(0), step=0)
    ledger.add_policy(run, policy(1), step=0, parent_version=0)
    assert [(p.version, p.parent_version) for p in ledger.policies(run)] == [(0, None), (1, 0)]


def test_old_policies_go_and_the_newest_stay(ledger: Ledger, run: str) -> None:
    versions_after(ledger, run, 4)
    assert removed(ledger, run) == [0, 1, 2]
    assert removed(ledger, run) == []
    assert ledger.policy(run, 0).removed_at is not None
    assert ledger.policy(run, 3).removed_at is None
    with pytest.raises(LedgerError, match=r"version 1 .* not in the store"):
        ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=1)])


def test_no_policy_goes_that_a_live_worker_holds_or_may_be_loading(ledger: Ledger, run: str) -> None:
    versions_after(ledger, run, 6)
    beat(ledger, run, "slow", 2)
    beat(ledger, run, "stopped", 0, "stopped")
    assert removed(ledger, run) == [0, 1]
    beat(ledger, run, "slow", 6)
    assert removed(ledger, run) == [2, 3, 4]


def test_nothing_goes_while_a_worker_loads_its_first_policy(ledger: Ledger, run: str) -> None:
    versions_after(ledger, run, 4)
    beat(ledger, run, "new", None, "starting")
    beat(ledger, run, "learner", None, purposes=())
    assert removed(ledger, run) == []
    assert removed(ledger, run, silent_s=-1.0) == [0, 1, 2]


def test_policies_of_checkpoints_and_evaluations_stay(ledger: Ledger, run: str) -> None:
    versions_after(ledger, run, 7)
    ledger.set_checkpoint(run, 2, "checkpoints/2", "0" * 64)
    ledger.add_evaluation(run, 0, 0, "calculator", {}, "0" * 64)
    ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=4)])
    beat(ledger, run, "evaluator", 1, purposes=[Purpose.EVALUATE])
    assert removed(ledger, run) == [3, 5]


def test_the_policy_of_a_checkpoint_stays_through_critic_only_steps(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(4))
    make(ledger, run, 4)
    for step in (1, 2):
        train(ledger, run, step, 1)
    ids = [r.trajectory_id for r in ledger.claim(run, 3, 1)]
    ledger.commit_update(run, 3, 2, 2, {}, ids, {}, None)
    ledger.set_checkpoint(run, 3, "checkpoints/3", "0" * 64)
    for version in (3, 4):
        ledger.add_policy(run, policy(version), step=4, parent_version=version - 1)
    assert removed(ledger, run) == [0, 1]


def test_superseded_policies_go_first(ledger: Ledger, run: str) -> None:
    versions_after(ledger, run, 3)
    ledger.rewind(run, 1)
    assert removed(ledger, run) == [2, 3]
