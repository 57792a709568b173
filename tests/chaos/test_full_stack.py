"""Kills in the full stack: real `sao train`, real learner, workers, evaluator and flow; nothing lost, nothing twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from full_stack import POINTS, AtRandom, ChaosRun

RANDOM_S = 240.0
"""How long processes are killed at random."""

WORKERS = (
    *[("worker generates", nth) for nth in (3, 12, 30)],
    *[("worker has put the object", nth) for nth in (1, 2)],
    ("worker has recorded", 2),
    *[("worker loads a policy", nth) for nth in (2, 9)],
    *[("worker holds leases", nth) for nth in (2, 3)],
    *[("evaluator generates", nth) for nth in (2, 5)],
    ("evaluator has put the object", 1),
)
"""The run itself makes up for these."""

LEARNER = (
    ("learner has claimed", 2),
    ("learner is between critic and policy", 3),
    ("learner publishes a policy", 6),
    ("learner has published, not committed", 3),
    ("learner has committed", 2),
    ("learner writes a checkpoint", 4),
    ("learner has not announced the checkpoint", 2),
    ("learner drops checkpoints", 2),
    *[("learner has rewound", 1)] * 2,
    *[("learner resumes", 1)] * 2,
)
FLOW = (
    ("flow commands", 5),
    ("flow has a report", 8),
    ("flow has begun an attempt", 1),
    ("flow is about to end", 1),
)
"""After each of these and of the learner's, `sao train --resume` once more."""

UPDATES = 16


@pytest.mark.long
def test_a_run_survives_a_killed_worker_and_is_resumed_after_its_learners_kill(tmp_path: Path, prefect_api, tally):
    plan = (("worker generates", 20), ("learner is between critic and policy", 3))
    run = ChaosRun(tmp_path, prefect_api, plan, "learner.updates=6", "rollout.workers=1")
    run.survive()
    assert {kill.name for kill in run.kills()} == {name for name, _ in plan}
    assert len(run.outputs) == 2
    run.check(6, tally)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", [(*LEARNER[::2], *WORKERS[::2]), (*LEARNER[1::2], *WORKERS[1::2]), FLOW])
def test_every_named_point(plan, tmp_path: Path, prefect_api, tally):
    run = ChaosRun(tmp_path, prefect_api, plan, f"learner.updates={UPDATES}", "rollout.workers=2")
    run.survive()
    assert sorted(kill.name for kill in run.kills()) == sorted(name for name, _ in plan)
    run.check(UPDATES, tally)


def test_every_point_is_in_a_plan():
    assert {name for plan in (WORKERS, LEARNER, FLOW) for name, _ in plan} == set(POINTS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_process_at_any_time(tmp_path: Path, prefect_api, tally):
    started, number = time.monotonic(), 0
    while time.monotonic() - started < RANDOM_S:
        number += 1
        run = ChaosRun(tmp_path / f"{number}", prefect_api, (), f"learner.updates={UPDATES}", "rollout.workers=2")
        run.survive(AtRandom(run, seed=number, every_s=(4.0, 12.0), until=started + RANDOM_S))
        run.check(UPDATES, tally)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_learner_whose_flow_is_killed_keeps_a_checkpoint_of_its_last_step(tmp_path: Path, prefect_api, tally):
    run = ChaosRun(tmp_path, prefect_api, (("flow has a report", 9),), "learner.updates=8", "rollout.workers=1")
    run.attempt()
    run.wait_until_gone(60)
    checkpoint = run.ledger.latest_checkpoint(run.run_id)
    assert checkpoint is not None
    assert checkpoint.step == run.ledger.run(run.run_id).step > 2
    run.survive()
    run.check(8, tally)
