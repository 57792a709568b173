import asyncio
import json

import pytest

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

SPEC = get("openenv")


@pytest.fixture
def url(openenv_url):
    return openenv_url


def source(url, seed=0, **options):
    parsed = SPEC.parse_options({"url": url, "observation_field": "text", **options})
    return parsed, SPEC.tasks(parsed, seed)


async def play(options, task, replies):
    environment = SPEC.make(options, Outside())
    try:
        opening = await environment.reset(task)
        return opening, [await environment.step(reply) for reply in replies]
    finally:
        await environment.close()


def test_an_episode_is_played_over_the_websocket(url):
    options, tasks = source(url, instructions="Guess.", reset={"limit": 7})
    task = tasks.task("train/0")
    secret = task.data["seed"] % 7
    wrong = (secret + 1) % 7
    replies = [f'I try {{"number": {n}, "comment": "hm"}}' for n in (wrong, secret)]
    opening, (first, last) = asyncio.run(play(options, task, replies))
    assert opening == (Message(Role.SYSTEM, "Guess."), Message(Role.USER, "below 7"))
    assert first.observation == (Message(Role.USER, "less" if wrong > secret else "more"),)
    assert (first.reward, first.terminated, first.truncated) == (-0.1, False, False)
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)


def test_a_malformed_action_costs_a_turn_and_is_told(url):
    options, tasks = source(url, max_turns=3, observation_field=None)
    opening, results = asyncio.run(play(options, tasks.task("train/0"), ["seven", '{"number": "x"}', '{"digit": 3}']))
    assert json.loads(opening[0].content) == {"text": "below 10", "tries": 0}
    texts = [result.observation[0].content for result in results]
    assert texts[0] == "error: write one action as a JSON object"
    assert texts[1].startswith("error: the OpenEnv server answered VALIDATION_ERROR: ")
    assert "number: Input should be a valid integer" in texts[1]
    assert "digit: Extra inputs are not permitted" in texts[2]
    assert [result.truncated for result in results] == [False, False, True]
    assert all(result.info["reward_parts"] == {"malformed": 1.0} for result in results)


def test_an_environment_that_raises_fails_the_rollout_with_its_reason(url):
    options, tasks = source(url)
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the die fell off the table"):
        asyncio.run(play(options, tasks.task("train/0"), ['{"number": -1}']))


def test_more_rollouts_than_the_server_has_sessions_take_turns(url):
    options, tasks = source(url)
    task = tasks.task("train/0")

    async def all_of_them():
        replies = [json.dumps({"number": task.data["seed"] % 10})]
        return await asyncio.gather(*(play(options, task, replies) for _ in range(6)))

    assert [results[0].reward for _, results in asyncio.run(all_of_them())] == [1.0] * 6


def test_a_field_that_the_action_does_not_have_is_named(url):
    with pytest.raises(ConfigError, match=r"got `message`; there are: .*number"):
        source(url, action_field="message")
