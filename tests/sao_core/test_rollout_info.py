"""What environments leave beside rewards is kept with the rollout, from whichever step it came last."""

from __future__ import annotations

import math

from parts_fixtures import Counting, StretchedEngine, play
from rollout_fixtures import ScriptedEngine, heard, over, said

from sao_core.environments.base import StepResult
from sao_core.rollout.parts import RolloutPart, join

CALL, ANSWER = said("calc: 1+2"), said("answer: 3")


def test_texts_and_finite_numbers_are_kept_the_last_of_each_name() -> None:
    first = heard(
        "3", info={"patch": "draft", "tests": 3, "share": math.nan, "files": ["a"], "reward_parts": {"b": 0.0}}
    )
    last = StepResult(reward=1.0, terminated=True, info={"patch": "final", "complete": True})
    (t,) = play(ScriptedEngine([CALL, ANSWER]), Counting([first, last]), partial_after_s=1e9)
    assert t.info == {"patch": "final", "tests": 3, "complete": True}
    assert t.reward_parts == {"b": 0.0}


def test_a_rollout_that_is_cut_keeps_what_it_had() -> None:
    (t,) = play(ScriptedEngine([CALL]), Counting([heard("3", info={"patch": "draft"})]), max_turns=1)
    assert (str(t.outcome), t.info) == ("truncated", {"patch": "draft"})


def test_another_worker_goes_on_with_what_was_left_before() -> None:
    parts: list[RolloutPart] = []

    def put(part: RolloutPart) -> bool:
        parts.append(part)
        return True

    results = [heard("3", info={"patch": "draft", "tests": 3}), over(1.0)]
    play(StretchedEngine([CALL, ANSWER[:1], ANSWER[1:]]), Counting(results), put=put)
    begun = join(parts)
    assert begun.segments[-1].info == {"patch": "draft", "tests": 3}
    ending = StepResult(reward=1.0, terminated=True, info={"patch": "final"})
    (t,) = play(ScriptedEngine([ANSWER[1:]]), Counting([results[0], ending][1:]), begun=begun, attempt=2)
    assert t.info == {"patch": "final", "tests": 3}
