"""Members of a run are killed at every stage, and nothing that was recorded is lost or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from kill_points import ANY_TIME, POINTS
from rig import Result, run_rig
from rig_plan import Plan
from rig_services import BACKENDS

KILLS_PER_RIG = 250
SHARE = {"sqlite+folder": 0.75, "postgres+s3": 0.25}
"""Of the kills; a start and a step cost four times the processor time on the latter."""
MANY = 200
"""So many kills on one backend reach every point."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_kills_at_every_stage_lose_nothing_and_train_nothing_twice(
    backend: str,
    kills: int,
    seed: int,
    places: Callable[[str], dict[str, object]],
    held: Callable[[Plan, Result], None],
) -> None:
    kills = int(kills * SHARE[backend])
    died: Counter[str] = Counter()
    number = 0
    while (left := kills - died.total() + died[ANY_TIME]) > 0:
        wanted = min(KILLS_PER_RIG, left)
        plan = Plan(seed=seed + number, kills=wanted, limit_s=120 + 8 * wanted, **places(backend))
        plan = replace(plan, group_size=1 + plan.seed % 2)
        result = run_rig(plan)
        held(plan, result)
        died += result.kills
        number += 1
    if kills >= MANY:
        missed = [point.name for point in POINTS if not died[point.name]]
        assert not missed, f"seed {seed}: these points were never reached: {missed} ({died})"
        assert died[ANY_TIME] >= 3


def test_a_learner_that_stalls_while_its_run_is_resumed_can_harm_nothing(
    kills: int,
    seed: int,
    places: Callable[[str], dict[str, object]],
    held: Callable[[Plan, Result], None],
) -> None:
    stalls = max(8, kills // 10)
    plan = Plan(seed=seed, kills=stalls, stalls=True, limit_s=120 + 10 * stalls, **places("sqlite+folder"))
    result = run_rig(plan)
    held(plan, result)
    assert result.stalls.total() >= stalls
