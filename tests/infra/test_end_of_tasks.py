"""A finite set of tasks: epochs are whole, the last batch may be smaller, and what teaches nothing is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infra_fixtures import LEASE_S, TRAIN, Places, row, start_run, train

from infra.learner_ports import LedgerBatches
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.prompts import PromptIssuer
from infra.trajectory_store import TrajectoryStore
from sao_core.algorithms import PRESETS
from sao_core.config import ConfigError, parse_config
from sao_core.protocols import TasksOver
from sao_core.trajectory import Purpose

ROWS = 5


def configuration(tmp: Path, algorithm: str = "sao", **environment: Any) -> Any:
    rows, held = tmp / "rows.jsonl", tmp / "held.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"double {n}", "answer": 2 * n}) for n in range(ROWS)))
    held.write_text(json.dumps({"prompt": "double 100", "answer": 200}))
    options = {"path": str(rows), "evaluation_path": str(held)}
    return parse_config(
        {
            "environment": {"name": "jsonl", "options": options, **environment},
            "algorithm": {"name": algorithm, "group_size": 2 if algorithm == "grpo-dis" else None},
            "learner": {"batch_size": 4},
            "critic": {"pretrain": {"rollouts": 3}},
        }
    )


class Run:
    """The flow's issuer, a worker and the learner's batches of one run."""

    def __init__(self, ledger: Ledger, places: Places, config: Any) -> None:
        self.ledger, self.run = ledger, start_run(ledger)
        self.issuer = PromptIssuer(ledger, self.run, config)
        store = TrajectoryStore(ObjectStore(places.object_store, endpoint_url=places.endpoint_url))
        algorithm = PRESETS[config.algorithm.name]
        self.batches = LedgerBatches(ledger, store, self.run, algorithm, config.learner.batch_size, ends=True)
        self.asked: list[str] = []

    def generate(self, score: float = 1.0) -> None:
        self.issuer.fill()
        requests = self.ledger.lease(self.run, "w", TRAIN, 99, LEASE_S)
        self.asked += [request.prompt_key for request in requests]
        self.ledger.record(self.run, "w", [row(request, score=score) for request in requests])

    def claimable(self, step: int) -> int | None:
        return self.batches._claimable(step)


@pytest.fixture
def run(ledger: Ledger, places: Places, tmp_path: Path) -> Run:
    return Run(ledger, places, configuration(tmp_path, epochs=2))


def test_an_epoch_holds_every_prompt_once_and_the_last_batch_is_what_is_left(run: Run) -> None:
    run.issuer.value_pretraining()
    sizes = []
    for step in range(1, 4):
        run.generate()
        run.issuer.fill()
        size = run.claimable(step)
        assert size is not None
        sizes.append(len(train(run.ledger, run.run, step, size)))
    assert sizes == [4, 4, 2]
    assert [sorted(run.asked[start : start + ROWS]) for start in (0, ROWS)] == [[f"row/{n}" for n in range(ROWS)]] * 2
    with pytest.raises(TasksOver):
        run.claimable(4)
    assert run.issuer.fill() == 0


def test_the_last_batch_waits_for_every_rollout_in_the_making(run: Run) -> None:
    run.generate()
    for step in (1, 2):
        train(run.ledger, run.run, step, 4)
    run.issuer.fill()
    run.issuer.fill()
    assert run.ledger.rest(run.run, 3) is None, "two rollouts are not made yet"
    leased = run.ledger.lease(run.run, "w", TRAIN, 99, LEASE_S)
    run.ledger.record(run.run, "w", [row(leased[0])])
    run.issuer.fill()
    assert run.claimable(3) is None
    run.ledger.record(run.run, "w", [row(leased[1])])
    assert run.claimable(3) == 2


def test_a_rewound_last_batch_is_claimed_again(run: Run) -> None:
    for step in (1, 2):
        run.generate()
        train(run.ledger, run.run, step, 4)
    run.generate()
    run.issuer.fill()
    trained = train(run.ledger, run.run, 3, 2)
    run.ledger.rewind(run.run, 2)
    assert run.claimable(3) == 2
    assert {found.trajectory_id for found in run.ledger.claim(run.run, 3, 2)} == set(trained)
    assert run.claimable(3) == 2, "asked again, it is the same batch"


def test_what_comes_between_two_looks_makes_no_batch_larger(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.generate()
    train(run.ledger, run.run, 1, 4)
    run.generate()
    run.issuer.fill()
    assert run.ledger.rest(run.run, 2) == 6
    monkeypatch.setattr(run.ledger, "can_claim", lambda *_: False)
    assert run.claimable(2) == 4


def test_groups_stay_whole_in_the_last_batch(ledger: Ledger, places: Places, tmp_path: Path) -> None:
    run = Run(ledger, places, configuration(tmp_path, "grpo-dis", epochs=1))
    sizes = []
    for step in range(1, 4):
        run.generate()
        run.issuer.fill()
        size = run.claimable(step)
        assert size is not None
        sizes.append(len(train(run.ledger, run.run, step, size)))
    assert sizes == [4, 4, 2]
    assert sorted(run.asked) == sorted(2 * [f"row/{n}" for n in range(ROWS)])


def test_a_prompt_that_teaches_nothing_is_asked_no_more(ledger: Ledger, places: Places, tmp_path: Path) -> None:
    run = Run(ledger, places, configuration(tmp_path, drop_after=2))
    solved_now_and_then = 0
    for step in range(1, 9):
        run.issuer.fill()
        rows = []
        for request in ledger.lease(run.run, "w", TRAIN, 99, LEASE_S):
            run.asked.append(request.prompt_key)
            solved_now_and_then += request.prompt_key == "row/0"
            rows.append(row(request, score=float(request.prompt_key != "row/0" or solved_now_and_then % 2)))
        ledger.record(run.run, "w", rows)
        train(ledger, run.run, step, 4)
    assert set(run.asked[:ROWS]) == {f"row/{n}" for n in range(ROWS)}
    assert set(run.asked[-8:]) == {"row/0"}


def test_the_tasks_are_over_once_all_are_dropped(ledger: Ledger, places: Places, tmp_path: Path) -> None:
    run = Run(ledger, places, configuration(tmp_path, drop_after=2))
    step = 1
    while ledger.rest(run.run, step) != 0:
        run.generate(score=0.0)
        size = run.claimable(step)
        if size is not None:
            train(ledger, run.run, step, size)
            step += 1
    assert step > 3
    with pytest.raises(TasksOver):
        run.claimable(step)
    assert {key: run.asked.count(key) >= 2 for key in set(run.asked)} == {f"row/{n}": True for n in range(ROWS)}


def test_more_is_not_counted_as_the_end(ledger: Ledger, places: Places, tmp_path: Path) -> None:
    run = Run(ledger, places, configuration(tmp_path, epochs=2))
    run.generate()
    assert ledger.rest(run.run, 1) is None
    assert ledger.prompts_issued(run.run, Purpose.TRAIN) == 8


@pytest.mark.parametrize("setting", ["epochs", "drop_after"])
def test_endless_tasks_have_no_epochs(ledger: Ledger, setting: str) -> None:
    config = parse_config({"environment": {"name": "calculator", setting: 2}})
    with pytest.raises(ConfigError, match=rf"environment\.{setting} needs a finite set of tasks.*train_tasks"):
        PromptIssuer(ledger, start_run(ledger), config)
