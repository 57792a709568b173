import asyncio
import re
import sys
import threading
import time

import numpy as np
import pytest

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.environments.gymnasium_spaces import MalformedAction, action_of, observed, said_as, without_ansi
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
SPEC = get("gymnasium")
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


class Words(gymnasium.Env):
    """Says a word to repeat; three right answers end it. Remembers who used it."""

    reward_range = (-1.0, 3.0)
    alive = 0

    def __init__(self, length=4, sensor=None, unseeded=False):
        self.observation_space = spaces.Dict({"word": spaces.Text(9), "left": spaces.Discrete(4)})
        if sensor:
            self.observation_space["sensor"] = spaces.Box(-1, 1, (sensor,))
        self.action_space = spaces.Text(9)
        self.length, self.unseeded = length, unseeded
        self.threads = {threading.get_ident()}
        type(self).alive += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=None if self.unseeded else seed)
        self.left = 3
        return self._observation(), {}

    def _observation(self):
        self.threads.add(threading.get_ident())
        self.word = "".join(self.np_random.choice(list("abcdef"), self.length))
        return {"word": self.word, "left": self.left}

    def step(self, action):
        if action == "crash":
            raise OSError("the power is out")
        right = action == self.word
        self.left -= right
        return self._observation(), 1.0 if right else -0.5, self.left == 0, action == "truncate", {}

    def close(self):
        self.threads.add(threading.get_ident())
        type(self).alive -= 1
        assert len(self.threads) == 1


def make_words(**kwargs):
    return Words(**kwargs)


def no_environment():
    return 3


def echo(observation, environment):
    return observation["word"]


WORDS = {"make": f"{__name__}:make_words"}


def source(seed=0, **options):
    parsed = SPEC.parse_options(options)
    return parsed, SPEC.tasks(parsed, seed)


def play(options, task, replies):
    """The opening, the results of the replies, and the environment after its close."""

    async def episode():
        environment = SPEC.make(options, Outside())
        try:
            opening = await environment.reset(task)
            results = [await environment.step(reply(results_so_far) if callable(reply) else reply) for reply in replies]
        finally:
            await environment.close()
        return opening, results, environment

    results_so_far = []
    return asyncio.run(episode())


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        source(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_named_actions_lead_over_the_lake_to_the_goal():
    options, tasks = source(**LAKE)
    opening, results, _ = play(options, tasks.task("train/0"), [f"action: {name}" for name in TO_THE_GOAL])
    assert opening == (
        Message(Role.SYSTEM, "Write `action: ` and one of left, down, right, up."),
        Message(Role.USER, "0"),
    )
    assert [result.observation[0].content for result in results] == ["4", "8", "9", "10", "14", "15"]
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.terminated for result in results] == [False] * 5 + [True]
    assert not any(result.truncated for result in results)


def test_a_hole_ends_the_episode_without_reward():
    options, tasks = source(**LAKE)
    _, results, _ = play(options, tasks.task("train/0"), ["action: right", "action: down"])
    assert (results[-1].reward, results[-1].terminated) == (0.0, True)


def test_what_the_environment_draws_is_read_with_the_marked_place_in_brackets():
    options, tasks = source(**LAKE, observe="render", instructions="")
    opening, results, _ = play(options, tasks.task("train/0"), ["down"])
    assert opening == (Message(Role.USER, "[S]FFF\nFHFH\nFFFH\nHFFG"),)
    assert results[0].observation == (Message(Role.USER, "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"),)


@pytest.mark.parametrize("reply", ["north", "action: 4", "action: left right", "", "action:", "I go left"])
def test_a_malformed_action_costs_a_turn_and_is_told(reply):
    options, tasks = source(**LAKE, malformed_reward=-0.25, max_turns=2)
    _, results, _ = play(options, tasks.task("train/0"), [reply, reply])
    told = Message(Role.USER, "error: write `action: ` and one of left, down, right, up\n\n0")
    assert [result.observation for result in results] == [(told,), (told,)]
    assert [(result.reward, result.terminated) for result in results] == [(-0.25, False)] * 2
    assert [result.truncated for result in results] == [False, True]
    assert results[0].info["reward_parts"] == {"malformed": 1.0}


def test_the_limit_of_turns_and_the_environments_own_cut_an_episode():
    options, tasks = source(**LAKE, max_turns=3)
    _, results, _ = play(options, tasks.task("train/0"), ["left"] * 3)
    assert [result.truncated for result in results] == [False, False, True]
    options, tasks = source(**WORDS)
    _, results, _ = play(options, tasks.task("train/0"), ["truncate"])
    assert (results[0].truncated, results[0].terminated) == (True, False)
    options, tasks = source(id="FrozenLake-v1", kwargs={"is_slippery": False, "max_episode_steps": 2})
    _, results, _ = play(options, tasks.task("train/0"), ["0", "0"])
    assert [result.truncated for result in results] == [False, True]


def test_texts_are_observed_and_answered_and_the_range_is_the_environments():
    options, tasks = source(**WORDS)
    (_, first), _, _ = play(options, tasks.task("train/0"), [])
    word = re.fullmatch(r"word: ([a-f]{4})\nleft: 3", first.content).group(1)
    opening, (result,), environment = play(options, tasks.task("train/0"), [f"action: {word}"])
    assert opening[0].content == "Write `action: ` and a text of 1 to 9 characters."
    assert (result.reward, result.observation[0].content.splitlines()[1]) == (1.0, "left: 2")
    assert environment.reward_range == (-1.0, 3.0)
    given, _ = source(**WORDS, reward_range=(-2, 2))
    assert play(given, tasks.task("train/0"), [])[2].reward_range == (-2.0, 2.0)
    cliff, cliffs = source(id="CliffWalking-v1")
    assert play(cliff, cliffs.task("train/0"), [])[2].reward_range == (float("-inf"), float("inf"))


def test_every_environment_is_closed_in_its_thread_also_after_a_failure():
    options, tasks = source(**WORDS)
    assert Words.alive == 0
    with pytest.raises(OSError, match="the power is out"):
        play(options, tasks.task("train/0"), ["crash"])
    assert Words.alive == 0
    list(SPEC.demonstrations(options, 0, 2))
    assert Words.alive == 0


def test_the_same_key_is_the_same_episode_and_splits_share_no_seed():
    options, tasks = source(**WORDS)
    first, again, other = (play(options, tasks.task(key), [])[0] for key in ("train/0", "train/0", "train/1"))
    assert first == again != other
    seeds = {split: {tasks.task(f"{split}/{n}").data["seed"] for n in range(200)} for split in ("train", "evaluation")}
    assert len(seeds["train"]) == 200
    assert not seeds["train"] & seeds["evaluation"]
    assert tasks.evaluation_keys(2) == ["evaluation/0", "evaluation/1"]
    assert source(seed=1, **WORDS)[1].task("train/0").data != tasks.task("train/0").data
    _, few = source(**WORDS, size=3)
    assert {few.key_at(position) for position in range(9)} == {"train/0", "train/1", "train/2"}
    for key in ("test/0", "train/x"):
        with pytest.raises(KeyError):
            tasks.task(key)


def restored(options, task, replies, then):
    async def episode():
        begun, second = SPEC.make(options, Outside()), SPEC.make(options, Outside())
        try:
            await begun.reset(task)
            for reply in replies:
                await begun.step(reply)
            await second.restore(task, begun.state())
            return [await environment.step(then) for environment in (begun, second)]
        finally:
            await begun.close()
            await second.close()

    return asyncio.run(episode())


def test_another_worker_plays_the_episode_again_and_goes_on():
    options, tasks = source(**LAKE, max_turns=4)
    first, second = restored(options, tasks.task("train/0"), ["down", "what?", "action: down"], "right")
    assert first == second
    assert (first.observation[0].content, first.truncated) == ("9", True)


def test_an_environment_that_goes_elsewhere_the_second_time_is_not_restored():
    options, tasks = source(**WORDS, kwargs={"unseeded": True})
    with pytest.raises(ValueError, match="not deterministic"):
        restored(options, tasks.task("train/0"), ["abcd"], "abcd")


def test_demonstrations_name_actions_as_replies_must():
    options, tasks = source(**LAKE, max_turns=8)
    for index, messages in enumerate(SPEC.demonstrations(options, 0, 5)):
        replies = [message.content for message in messages if message.role is Role.ASSISTANT]
        opening, results, _ = play(options, tasks.task(f"demonstration/{index}"), replies)
        told = [message for result in results[:-1] for message in result.observation]
        assert [*opening, *told] == [message for message in messages if message.role is not Role.ASSISTANT]
        assert results[-1].terminated or len(replies) == 8
        assert messages[-1].role is Role.ASSISTANT
    own, _ = source(**WORDS, demonstrator=f"{__name__}:echo")
    (messages,) = SPEC.demonstrations(own, 0, 1)
    assert [message.role for message in messages[1:]] == [Role.USER, Role.ASSISTANT] * 3
    assert messages[2].content == f"action: {messages[1].content.splitlines()[0].removeprefix('word: ')}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either id or make: got id=None, make=None"),
        ({"id": "FrozenLake-v1", "make": "a:b"}, "set either id or make"),
        ({"id": "FrozenLke-v1"}, "environment.options.id `FrozenLke-v1`: "),
        ({"id": "Taxi-v3"}, "Please use `Taxi-v4` instead"),
        ({"id": "FrozenLake-v1", "kwargs": {"map": 3}}, "got {'map': 3}"),
        ({**LAKE, "actions": ["left", "right"]}, "each action of a discrete space a name of its own: got 2 for"),
        ({**LAKE, "actions": ["a", "b", "c", "A"]}, "got 3 for Discrete(4)"),
        ({**WORDS, "actions": ["left"]}, "got 1 for Text"),
        ({**WORDS, "kwargs": {"sensor": 300}}, "has 301 numbers, more than the 256"),
        ({"make": f"{__name__}:no_environment"}, "must return a gymnasium.Env: got int"),
        ({"make": "no_such_module:x"}, "cannot be imported: `no_such_module`"),
        ({"id": "Blackjack-v1", "observe": "render"}, "draws no text: its render modes are human, rgb_array"),
        ({**LAKE, "reward_range": (1, 0)}, "reward_range must hold the smaller number first: got (1.0, 0.0)"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_settings_that_cannot_work_are_named_in_one_line(options, message):
    assert message in refusal(**options)
    assert Words.alive == 0


def test_a_missing_package_says_which_extra_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert refusal(id="FrozenLake-v1") == (
        "environment.name `gymnasium` needs a package that is not installed: pip install 'sao-pipeline[gymnasium]'"
    )


@pytest.mark.parametrize("name", ["Blackjack-v1", "CliffWalking-v1", "Taxi-v4", "CartPole-v1"])
def test_other_environments_of_the_package_are_played_in_numbers(name):
    options, tasks = source(id=name)
    _, results, _ = play(options, tasks.task("train/0"), ["action: 0"])
    assert results[0].info["reward_parts"] == {"malformed": 0.0}


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(5), np.int64(3), "3"),
        (spaces.Text(9), "go on", "go on"),
        (spaces.Box(-9, 9, (2,)), np.array([0.123456, -2.0], np.float32), "[0.1235, -2.0]"),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), "[1, 0, 1]"),
        (spaces.Tuple((spaces.Discrete(3), spaces.Text(3))), (np.int64(2), "ab"), '[2, "ab"]'),
        (
            spaces.Dict({"at": spaces.Box(0, 9, (2,), np.int64), "say": spaces.Text(9)}),
            {"at": np.array([1, 2]), "say": "hi"},
            "at: [1, 2]\nsay: hi",
        ),
    ],
    ids=["discrete", "text", "box", "bits", "tuple", "dict"],
)
def test_observations_read_compactly(space, value, text):
    assert observed(space, value) == text


ROOM = spaces.Dict({"door": spaces.Discrete(3), "force": spaces.Box(0, 1, (2,), np.float32)})


@pytest.mark.parametrize(
    ("space", "names", "reply", "action"),
    [
        (spaces.Discrete(3), (), "action: 2", 2),
        (spaces.Discrete(3, start=-1), (), "Action = -1.", -1),
        (spaces.Discrete(2), ("up", "Down"), "I think.\nACTION: `down`", 1),
        (spaces.Discrete(2), ("up", "down"), "action: up\naction: down", 1),
        (spaces.Discrete(2), ("up", "down"), "action: 0", 0),
        (spaces.MultiDiscrete([2, 3]), (), "action: [1, 2]", [1, 2]),
        (spaces.MultiBinary(2), (), "[1, 0]", [1, 0]),
        (spaces.Box(-1, 1, (2,), np.float32), (), "action: [0.5, -1]", [0.5, -1]),
        (spaces.Text(9, charset="abc "), (), "action: ab c", "ab c"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Text(3))), (), 'action: [1, "ab"]', (1, "ab")),
        (ROOM, (), 'action: {"door": 2, "force": [0, 1]}', {"door": 2, "force": [0, 1]}),
    ],
)
def test_actions_are_read_and_said(space, names, reply, action):
    read = action_of(reply, space, names)
    assert space.contains(read)
    if isinstance(action, dict):
        assert read["door"] == action["door"]
        assert read["force"].tolist() == action["force"]
    else:
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == action
    again = action_of(said_as(read, space, names), space, names)
    assert str(again) == str(read)


@pytest.mark.parametrize(
    ("space", "reply"),
    [
        (spaces.Discrete(3), "action: 3"),
        (spaces.Discrete(3), "action: -1"),
        (spaces.Discrete(3), "action: ²"),
        (spaces.Discrete(3), "action: 1.5"),
        (spaces.MultiDiscrete([2, 3]), "action: [1, 3]"),
        (spaces.MultiDiscrete([2, 3]), "action: [1, 1.5]"),
        (spaces.MultiDiscrete([2, 3]), "action: [1, [2]]"),
        (spaces.Box(-1, 1, (2,), np.float32), "action: [NaN, 0]"),
        (spaces.Box(-1, 1, (2,), np.float32), 'action: ["a", 0]'),
        (spaces.Box(-1, 1, (2,), np.float32), "action: null"),
        (spaces.Text(3, charset="abc"), "action: abd"),
        (spaces.Text(3, charset="abc"), "action: abca"),
        (ROOM, 'action: {"door": 1}'),
        (ROOM, "action: {"),
        (spaces.Tuple((spaces.Discrete(2),)), "action: [1, 1]"),
        (spaces.Tuple((spaces.Discrete(2),)), "action: " + "[" * 5000),
    ],
)
def test_what_is_no_action_is_refused(space, reply):
    with pytest.raises(MalformedAction, match=r"^error: write `action: ` and "):
        action_of(reply, space, ())


def test_a_reply_of_empty_lines_is_refused_at_once():
    started = time.process_time()
    with pytest.raises(MalformedAction):
        action_of("\n" * 50_000, spaces.Discrete(2), ())
    assert time.process_time() - started < 1


def test_colours_of_a_terminal_are_no_text():
    assert without_ansi("\n\x1b[41mS\x1b[0mF\n\x1b[34;1mR\x1b[0m|\x1b[43m \x1b[0m\n") == "[S]F\nR|[ ]"
