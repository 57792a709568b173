"""Which rollouts of an evaluation are worth a look, on both databases."""

from __future__ import annotations

from infra_fixtures import row

from infra.ledger import Ledger, NewRequest
from sao_core.trajectory import Purpose, Sampling

EVALUATE = (Purpose.EVALUATE,)


def evaluated(ledger: Ledger, run: str, rollouts: list[tuple[float, int]], greedy: bool = False) -> list[str]:
    """Record a rollout for each (score, length); returns their ids."""
    sampling = Sampling(greedy=greedy)
    ledger.issue(
        run,
        [
            NewRequest(Purpose.EVALUATE, f"held-out-{i}", sampling=sampling, policy_version=0)
            for i in range(len(rollouts))
        ],
    )
    requests = ledger.lease(run, "w", EVALUATE, len(rollouts), 30.0)
    rows = [
        row(request, score=score, num_action_tokens=length, greedy=greedy)
        for request, (score, length) in zip(requests, rollouts, strict=True)
    ]
    return list(ledger.record(run, "w", rows))


def test_the_best_the_worst_and_a_typical_one_are_sampled_ones_in_order(ledger: Ledger, run: str) -> None:
    ids = evaluated(ledger, run, [(0.0, 5), (1.0, 4), (0.5, 6), (1.0, 9), (0.0, 3), (0.25, 7)])
    evaluated(ledger, run, [(9.0, 1), (-9.0, 1)], greedy=True)
    notable = ledger.notable_rollouts(run, 0, 2)
    assert [best.trajectory_id for best in notable.best] == [ids[3], ids[1]]
    assert [worst.trajectory_id for worst in notable.worst] == [ids[4], ids[0]]
    assert notable.typical is not None
    assert notable.typical.trajectory_id == ids[2]


def test_no_rollout_is_among_the_best_and_the_worst(ledger: Ledger, run: str) -> None:
    ids = evaluated(ledger, run, [(1.0, 1), (1.0, 2), (1.0, 3), (0.0, 4)])
    notable = ledger.notable_rollouts(run, 0, 3)
    assert [best.trajectory_id for best in notable.best] == [ids[2], ids[1], ids[0]]
    assert [worst.trajectory_id for worst in notable.worst] == [ids[3]]


def test_an_evaluation_without_rollouts_has_none(ledger: Ledger, run: str) -> None:
    notable = ledger.notable_rollouts(run, 0, 3)
    assert (notable.best, notable.worst, notable.typical) == ((), (), None)


def test_all_segments_of_a_rollout_are_found_from_one(ledger: Ledger, run: str) -> None:
    ledger.issue(run, [NewRequest(Purpose.EVALUATE, "held-out", policy_version=0)])
    (request,) = ledger.lease(run, "w", EVALUATE, 1, 30.0)
    rows = [
        row(request, segment=segment, num_segments=2, trajectory_id=f"{run}-0-1-{segment}", object_row=segment)
        for segment in (0, 1)
    ]
    ledger.record(run, "w", rows)
    (second,) = [found for found in ledger.evaluation_rows(run, 0) if found.segment == 1]
    assert [found.segment for found in ledger.rollout(second)] == [0, 1]
