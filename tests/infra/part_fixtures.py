"""Builders for tests of rollouts that are not finished."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infra_fixtures import LEASE_S, TRAIN, prompts, trajectory

from infra.ledger import Ledger, PartRow, PartState
from sao_core.protocols import RolloutRequest
from sao_core.rollout.parts import RolloutPart
from sao_core.trajectory import Outcome


def part_row(request: RolloutRequest, number: int = 0, *, restorable: bool = True, **more: Any) -> PartRow:
    key = f"parts/{request.number}-{request.attempt}-{number}"
    return replace(PartRow(request.number, request.attempt, number, restorable, key, "0" * 64, 12, 6), **more)


def part(
    request: RolloutRequest, number: int = 0, *, tokens: int = 12, state: str | None = '{"turns": 1}'
) -> RolloutPart:
    piece = trajectory(request, tokens=tokens, seed=number, outcome=Outcome.FAILED, stop_reason="unfinished")
    return RolloutPart(number, (piece,), turns=1, open_tokens=2, state=state)


def lease(
    ledger: Ledger, run: str, worker: str = "w", count: int = 1, lease_s: float = LEASE_S
) -> list[RolloutRequest]:
    return ledger.lease(run, worker, TRAIN, count, lease_s)


def begin(ledger: Ledger, run: str, *restorable: bool, lease_s: float = LEASE_S) -> RolloutRequest:
    """Issue a request, lease it to `w` and record parts."""
    ledger.issue(run, prompts(1))
    (request,) = lease(ledger, run, lease_s=lease_s)
    for number, able in enumerate(restorable):
        assert ledger.record_part(run, "w", part_row(request, number, restorable=able))
    return request


def states(ledger: Ledger, run: str) -> list[tuple[int, int, PartState]]:
    return [(p.attempt, p.part, p.state) for p in ledger.parts(run)]
