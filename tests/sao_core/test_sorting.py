"""The dialogue in which every turn earns a reward, by itself and through the rollout loop."""

import asyncio

import numpy as np
import pytest
from rollout_fixtures import END, TOKENIZER, ScriptedEngine, request, said

from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments import get
from sao_core.environments.base import Task
from sao_core.environments.sorting import SortingOptions
from sao_core.outside import Outside
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Outcome, Role, validate_rollout

SPEC = get("sorting")
NUMBERS = Task("train/0", "4", {"numbers": [7, 2, 9, 4]})


def play(replies, task=NUMBERS, **options):
    async def episode():
        environment = SPEC.make(SortingOptions(**options), Outside())
        opening = await environment.reset(task)
        return opening, [await environment.step(reply) for reply in replies]

    return asyncio.run(episode())


def rollout_of(replies, **options):
    environment = SPEC.make(SortingOptions(**options), Outside())
    return asyncio.run(
        run_rollout(
            request(),
            ScriptedEngine([said(reply) for reply in replies]),
            environment,
            NUMBERS,
            Renderer(TOKENIZER),
            RolloutConfig(max_turns=8, max_action_tokens=64, max_context_tokens=512),
            environment_name="sorting",
            seed=0,
        )
    )


def test_every_right_turn_earns_its_share_at_once():
    opening, results = play(["2", "9", " 7.\n", "9"])
    assert opening == (Message(Role.USER, "7 2 9 4"),)
    assert [result.reward for result in results] == [0.25, 0.0, 0.25, 0.25]
    assert [result.observation for result in results] == [
        (Message(Role.USER, "right, left 7 9 4"),),
        (Message(Role.USER, "no 4, left 7 9"),),
        (Message(Role.USER, "right, left 9"),),
        (),
    ]
    assert [result.terminated for result in results] == [False, False, False, True]


def test_the_same_sum_can_be_paid_with_the_last_turn():
    _, results = play(["2", "9", "7", "9"], reward="final")
    assert [result.reward for result in results] == [0.0, 0.0, 0.0, 0.75]


@pytest.mark.parametrize("reply", ["", "two", "2 4", "2 2", "-2", "22", "٢", "2" * 99])
def test_what_is_not_the_number_earns_nothing_and_costs_the_turn(reply):
    _, (first, second) = play([reply, "4"])
    assert (first.reward, first.observation[0].content) == (0.0, "no 2, left 7 9 4")
    assert second.reward == 0.25
    assert first.info["reward_parts"]["malformed"] == (0.0 if reply in ("-2", "22") else 1.0)


def test_a_turns_reward_lands_on_the_last_action_token_of_that_turn():
    """Not on the observation behind it, and not all on the last turn (PITFALLS 3)."""
    (t,) = rollout_of(["2", "9", "7", "9"])
    ends = np.flatnonzero(t.action_mask & (t.token_ids == END))
    assert len(ends) == 4
    assert t.rewards[ends].tolist() == [0.25, 0.0, 0.25, 0.25]
    assert np.flatnonzero(t.rewards).tolist() == [ends[0], ends[2], ends[3]]
    assert not t.action_mask[ends[:3] + 1].any(), "an observation follows each turn but the last"
    assert ends[3] == t.num_tokens - 1
    assert (t.score, t.outcome, t.reward_parts) == (0.75, Outcome.COMPLETED, {"right": 3.0, "malformed": 0.0})
    assert float(t.rewards.sum()) == pytest.approx(t.score)
    validate_rollout((t,))


def test_a_final_reward_lands_on_the_last_action_token_of_all():
    (t,) = rollout_of(["2", "9", "7", "9"], reward="final")
    assert np.flatnonzero(t.rewards).tolist() == [t.num_tokens - 1]
    assert (float(t.rewards[-1]), t.score) == (0.75, 0.75)


def test_turns_that_a_limit_leaves_out_earn_nothing():
    (t,) = rollout_of(["2", "4", "7", "x" * 60])
    assert (t.outcome, t.score) == (Outcome.TRUNCATED, 0.75)


def test_a_dialogue_goes_on_in_another_process():
    async def episode():
        first = SPEC.make(SortingOptions(reward="final"), Outside())
        await first.reset(NUMBERS)
        await first.step("2")
        await first.step("9")
        second = SPEC.make(SortingOptions(reward="final"), Outside())
        await second.restore(NUMBERS, first.state())
        return [await second.step("7"), await second.step("9")]

    before, last = asyncio.run(episode())
    assert before.observation == (Message(Role.USER, "right, left 9"),)
    assert last.reward == 0.75


def test_an_environment_serves_one_episode():
    async def twice():
        environment = SPEC.make(SortingOptions(), Outside())
        await environment.reset(NUMBERS)
        await environment.reset(NUMBERS)

    with pytest.raises(RuntimeError, match="one episode"):
        asyncio.run(twice())


def test_lengths_come_equally_often_and_what_is_evaluated_is_never_trained_on():
    source = SPEC.tasks(SortingOptions(), 0)
    tasks = [source.task(source.key_at(position)) for position in range(600)]
    assert [task.difficulty for task in tasks[:6]] == ["3", "4", "5"] * 2
    trained = {tuple(task.data["numbers"]) for task in tasks}
    evaluated = {tuple(source.task(key).data["numbers"]) for key in source.evaluation_keys(300)}
    assert not trained & evaluated
    with pytest.raises(KeyError):
        source.task("row/0")


def test_demonstrations_are_dialogues_of_the_environment_and_leave_room():
    shares = []
    for index, messages in enumerate(SPEC.demonstrations(SortingOptions(), 0, 150)):
        numbers = SPEC.tasks(SortingOptions(), 0).task(f"demonstration/{index}").data["numbers"]
        replies = [message.content for message in messages if message.role is Role.ASSISTANT]
        opening, results = play(replies, Task("x", "", {"numbers": numbers}))
        heard = [*opening, *(message for result in results for message in result.observation)]
        assert [message for message in messages if message.role is not Role.ASSISTANT] == heard
        shares.append(sum(result.reward for result in results))
    assert 0.4 < sum(shares) / len(shares) < 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fewest": 6}, r"most must be at least fewest \(6\): got 5"),
        ({"largest": 5}, r"largest must exceed most \(5\), since numbers differ: got 5"),
        ({"reward": "sparse"}, "reward"),
    ],
)
def test_options_that_make_no_dialogue_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SPEC.parse_options(options)
