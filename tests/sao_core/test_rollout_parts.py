"""Parts of long rollouts: what they hold, what they add up to, and going on from them."""

import asyncio
import time
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from parts_fixtures import RENDERER, Counting, StretchedEngine, assert_begins_with, play
from rollout_fixtures import REWRITING_TEMPLATE, Answer, ScriptedEngine, heard, over, said, tokenizer_with

from sao_core.environments.base import StepResult, Task
from sao_core.protocols import Rollout
from sao_core.rollout.agent import NotRestored
from sao_core.rollout.engine import session_seed
from sao_core.rollout.parts import RolloutPart, join
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Outcome, Role

CALL, ANSWER = said("calc: 1+2-3*4+5"), said("answer: 3")


def cut_up(stretches: list[list[int]], results: list[Answer], **more: Any) -> tuple[Rollout, list[RolloutPart]]:
    """A rollout that puts a part whenever it can."""
    parts: list[RolloutPart] = []

    def put(part: RolloutPart) -> bool:
        parts.append(part)
        return True

    return play(StretchedEngine(stretches), Counting(results), put=put, **more), parts


STRETCHES = [CALL[:2], CALL[2:5], CALL[5:], ANSWER[:1], ANSWER[1:]]


def test_a_turn_sampled_in_stretches_is_one_turn_of_the_record() -> None:
    (cut,), parts = cut_up(STRETCHES, [heard("3", 0.25), over(0.5)])
    (whole,) = play(ScriptedEngine([CALL, ANSWER]), Counting([heard("3", 0.25), over(0.5)]))
    assert len(parts) == 3
    assert cut.turns == whole.turns
    assert cut.messages == whole.messages
    for name in ("token_ids", "action_mask", "policy_versions", "rewards"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
    expected = [-0.5 * (1 + i) for stretch in STRETCHES for i in range(len(stretch))]
    assert cut.behavior_logprobs[cut.action_mask].tolist() == expected


def test_the_last_token_of_a_turn_waits_for_its_reward() -> None:
    (t,), parts = cut_up(STRETCHES, [heard("3", 0.25), over(0.5)])
    prompt = len(RENDERER.prompt_ids([Message(Role.USER, "what is 1 plus 2")]))
    assert parts[0].pieces[0].num_tokens == prompt + 1
    assert parts[0].open_tokens == 1
    assert not any(part.pieces[-1].rewards.any() for part in parts[:2])
    assert (parts[2].turns, parts[2].open_tokens) == (1, 0)
    ends = [turn.stop - 1 for turn in t.turns if turn.role is Role.ASSISTANT]
    joined = join(parts).segments[0]
    assert np.flatnonzero(joined.rewards).tolist() == ends[:1]
    assert np.flatnonzero(t.rewards).tolist() == ends


def test_parts_never_repeat_or_change_and_add_up_to_the_rollout() -> None:
    (t,), parts = cut_up(STRETCHES, [heard("3", 0.25, info={"reward_parts": {"style": 0.25}}), over(0.5)])
    for count in range(1, len(parts) + 1):
        begun = join(parts[:count])
        assert begun.parts == count
        assert sum(part.num_tokens for part in parts[:count]) == begun.segments[0].num_tokens
        assert_begins_with(t, begun.segments[0])
    assert [message.content for part in parts for message in part.pieces[-1].messages] == [
        "what is 1 plus 2",
        "calc: 1+2-3*4+5",
        "3",
    ]
    last = join(parts).segments[0]
    assert (last.score, last.reward_parts, last.stop_reason) == (0.25, {"style": 0.25}, "unfinished")


def test_a_rollout_without_anything_old_makes_no_part() -> None:
    (t,), parts = cut_up([CALL, ANSWER], [heard("3"), over(1.0)], partial_after_s=30.0)
    assert parts == []
    assert t.score == 1.0


@pytest.mark.parametrize("partial_after_s", [1e-9, 30.0])
def test_a_rollout_whose_time_is_over_within_a_turn_ends_with_what_it_has(partial_after_s: float) -> None:
    (t,), parts = cut_up(STRETCHES, [], rollout_timeout_s=1e-6, partial_after_s=partial_after_s)
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "rollout_timeout")
    assert t.token_ids[t.action_mask].tolist() == CALL[: t.num_action_tokens]
    assert t.num_action_tokens in (2, 5, len(CALL))
    assert len(parts) <= 2


def test_the_turn_before_a_long_step_becomes_durable_while_the_step_takes() -> None:
    parts: list[RolloutPart] = []
    seen: list[int] = []

    async def slow() -> StepResult:
        await asyncio.sleep(0.4)
        seen.append(len(parts))
        return heard("3")

    def put(part: RolloutPart) -> bool:
        parts.append(part)
        return True

    play(ScriptedEngine([CALL, ANSWER]), Counting([slow, over(1.0)]), put=put, partial_after_s=0.05)
    assert seen == [1]
    assert parts[0].pieces[0].token_ids[-3:].tolist() == CALL[-4:-1]
    assert (parts[0].turns, parts[0].open_tokens, parts[0].state) == (0, len(CALL) - 1, '{"steps": 0}')


def test_a_part_that_is_refused_comes_later_and_longer_under_the_same_number() -> None:
    offered: list[RolloutPart] = []

    def put(part: RolloutPart) -> bool:
        offered.append(part)
        return len(offered) != 1

    (t,) = play(StretchedEngine(list(STRETCHES)), Counting([heard("3"), over(1.0)]), put=put)
    assert [part.number for part in offered] == [0, 0, 1]
    assert_begins_with(t, join(offered[1:]).segments[0])


def test_a_sink_that_fails_ends_the_rollout_also_while_the_environment_is_waited_for() -> None:
    def put(part: RolloutPart) -> bool:
        raise OSError("the disk is gone")

    async def slow() -> StepResult:
        await asyncio.sleep(0.3)
        return over(1.0)

    with pytest.raises(OSError, match="the disk is gone"):
        play(StretchedEngine(list(STRETCHES)), Counting([over(1.0)]), put=put)
    with pytest.raises(OSError, match="the disk is gone"):
        play(ScriptedEngine([ANSWER]), Counting([slow]), put=put, partial_after_s=0.05)


def test_a_state_that_is_no_json_fails_the_rollout_with_its_reason() -> None:
    class Opaque(Counting):
        def state(self) -> Any:
            return {object()}

    (t,) = play(ScriptedEngine([ANSWER]), Opaque([over(1.0)]), put=lambda part: True)
    assert t.outcome is Outcome.FAILED
    assert "environment state raised TypeError" in t.stop_reason


# --- going on -----------------------------------------------------------------------------------


def stored(part: RolloutPart) -> RolloutPart:
    """As another worker gets it: some seconds into the rollout."""
    timings = {"started_at": 5.0, "duration_s": 7.0, "environment_s": 2.0, "generation_s": 4.0}
    return replace(part, pieces=tuple(replace(piece, timings=timings) for piece in part.pieces))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_another_worker_goes_on_within_a_turn_or_after_it(count: int) -> None:
    (whole,), parts = cut_up(STRETCHES, [heard("3", 0.25), over(0.5)])
    begun = join([stored(part) for part in parts[:count]])
    spoken = begun.segments[0].num_action_tokens
    left = (CALL + ANSWER)[spoken:]
    turns = [left[: len(CALL) - spoken], ANSWER] if spoken < len(CALL) else [left]
    environment = Counting([heard("3", 0.25), over(0.5)][begun.turns :])
    engine = ScriptedEngine(turns)
    (t,) = play(engine, environment, begun=begun, attempt=2)
    assert environment.restored == [("task-4", {"steps": begun.turns})]
    assert engine.heard[0] == begun.segments[0].token_ids.tolist()
    assert environment.actions[-1] == "answer: 3"
    assert environment.actions[begun.turns :] == ["calc: 1+2-3*4+5", "answer: 3"][begun.turns :]
    assert_begins_with(t, begun.segments[0])
    np.testing.assert_array_equal(t.token_ids, whole.token_ids)
    np.testing.assert_array_equal(t.rewards, whole.rewards)
    assert (t.turns, t.messages, t.score) == (whole.turns, whole.messages, 0.75)
    assert (t.trajectory_id, t.attempt) == ("run-4-2-0", 2)
    assert t.timings["started_at"] == 5.0
    assert 7.0 <= t.timings["duration_s"] < 20.0
    assert t.timings["environment_s"] >= 2.0


def test_parts_go_on_where_they_ended() -> None:
    _, parts = cut_up(STRETCHES, [heard("3", 0.25), over(0.5)])
    first = parts[:2]
    more: list[RolloutPart] = []

    def put(part: RolloutPart) -> bool:
        more.append(part)
        return True

    spoken = join(first).segments[0].num_action_tokens
    engine = StretchedEngine([CALL[spoken:], ANSWER[:2], ANSWER[2:]])
    (t,) = play(engine, Counting([heard("3", 0.25), over(0.5)]), begun=join(first), put=put, attempt=2)
    assert [part.number for part in more] == [2]
    assert_begins_with(t, join([*first, *more]).segments[0])


def test_the_rewards_of_turns_before_are_kept_and_counted() -> None:
    _, parts = cut_up(STRETCHES, [heard("3", 0.25, info={"reward_parts": {"style": 0.25}}), over(0.5)])
    (t,) = play(ScriptedEngine([ANSWER]), Counting([over(0.5, {"style": 0.5})]), begun=join(parts), attempt=2)
    assert (t.score, t.reward_parts) == (0.75, {"style": 0.75})


def test_a_rollout_goes_on_in_the_segment_it_was_in() -> None:
    thought, answer = said("<think>1</think>calc: 1+2"), said("<think>2</think>answer: 3")
    renderer = Renderer(tokenizer_with(REWRITING_TEMPLATE))
    stretches = [thought[:3], thought[3:], answer[:2], answer[2:]]
    (first, second), parts = cut_up(stretches, [heard("3", 0.25), over(0.5)], renderer=renderer)
    begun = join(parts)
    assert [piece.segment for piece in parts[-1].pieces] == [0, 1]
    engine = ScriptedEngine([answer[1:]])
    again = play(engine, Counting([over(0.5)]), begun=begun, renderer=renderer, attempt=2)
    assert engine.heard == [begun.segments[1].token_ids.tolist()]
    for before, after in zip((first, second), again, strict=True):
        assert before.token_ids.tobytes() == after.token_ids.tobytes()
        assert before.rewards.tobytes() == after.rewards.tobytes()
        assert before.turns == after.turns


class Lost(Counting):
    async def restore(self, task: Task, state: Any) -> None:
        raise RuntimeError("the sandbox is gone")


class Changed(Counting):
    version: ClassVar[str] = "4"


class Forgetful(Counting):
    def state(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("environment", "state", "reason"),
    [
        (Lost, "{}", "environment restore raised RuntimeError: the sandbox is gone"),
        (Changed, "{}", "begun with environment_version 3, which is 4 now"),
        (Counting, None, "no state to restore"),
    ],
)
def test_an_environment_that_cannot_be_restored_says_so_and_is_closed(
    environment: type[Counting], state: str | None, reason: str
) -> None:
    _, parts = cut_up(STRETCHES, [heard("3"), over(1.0)])
    engine, broken = ScriptedEngine([ANSWER]), environment([over(1.0)])
    with pytest.raises(NotRestored, match=reason):
        play(engine, broken, begun=replace(join(parts), state=state), attempt=2)
    assert (engine.closed, broken.closed) == (1, 1)


def test_a_part_says_whether_the_environment_can_be_restored() -> None:
    parts: list[RolloutPart] = []
    for environment in (Counting([heard("3"), over(1.0)]), Forgetful([heard("3"), over(1.0)])):
        play(StretchedEngine(list(STRETCHES)), environment, put=lambda part: parts.append(part) is None)
    assert [part.state for part in parts] == ['{"steps": 0}', '{"steps": 0}', '{"steps": 1}', None, None, None]


def test_limits_count_from_the_first_start() -> None:
    _, parts = cut_up(STRETCHES, [heard("3"), over(1.0)])
    begun = join([stored(part) for part in parts])

    async def never() -> StepResult:
        await asyncio.Event().wait()
        raise AssertionError

    started = time.monotonic()
    (t,) = play(ScriptedEngine([ANSWER]), Counting([never]), begun=begun, rollout_timeout_s=7.2)
    assert time.monotonic() - started < 2
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "rollout_timeout")
    (t,) = play(ScriptedEngine([]), Counting([]), begun=begun, max_action_tokens=len(CALL))
    assert (t.stop_reason, t.num_action_tokens) == ("max_action_tokens", len(CALL))
    (t,) = play(ScriptedEngine([]), Counting([]), begun=begun, max_turns=1)
    assert t.stop_reason == "max_turns"
    (t,) = play(ScriptedEngine([], context=10), Counting([]), begun=begun)
    assert t.stop_reason == "max_context_tokens"


def test_a_rollout_that_goes_on_draws_with_other_random_numbers_than_it_began_with() -> None:
    _, parts = cut_up(STRETCHES, [heard("3"), over(1.0)])
    seeds = []
    for count in (2, 3):
        engine = ScriptedEngine([CALL[4:], ANSWER] if count == 2 else [ANSWER])
        play(engine, Counting([heard("3"), over(1.0)][count - 2 :]), begun=join(parts[:count]))
        seeds += engine.seeds
    assert len({session_seed(11, 4, 1), *seeds}) == 3


def test_a_missing_part_is_noticed() -> None:
    _, parts = cut_up(STRETCHES, [heard("3"), over(1.0)])
    for wrong in ([], parts[1:], [parts[0], parts[2]]):
        with pytest.raises(ValueError, match="are needed in order"):
            join(wrong)
