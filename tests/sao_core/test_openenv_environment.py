import asyncio
import http
import json
import sys
import threading

import pytest

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.environments.openenv_session import OpenEnvError
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

websockets = pytest.importorskip("websockets.sync.server")
SPEC = get("openenv")
SCHEMA = {"action": {"properties": {"message": {"type": "string"}, "metadata": {}}}, "observation": {}, "state": {}}


class Echo:
    """Speaks as an OpenEnv server does: repeats messages, and remembers what it was sent."""

    def __init__(self, busy=0):
        self.busy = busy
        self.received = []

    def schema(self, connection, request):
        if request.path != "/base/ws":
            response = connection.respond(http.HTTPStatus.OK, json.dumps(SCHEMA))
            response.headers["Content-Type"] = "application/json"
            return response
        return None

    def serve(self, connection):
        def answer(kind, **data):
            connection.send(json.dumps({"type": kind, "data": data}))

        if self.busy:
            self.busy -= 1
            answer("error", code="CAPACITY_REACHED", message="full")
            return
        for raw in connection:
            message = json.loads(raw)
            self.received.append(message)
            said = message["data"].get("message", "ready")
            if said == "hang up":
                return
            if said == "bad":
                errors = [{"loc": ["message"], "msg": "too rude"}]
                answer("error", code="VALIDATION_ERROR", message="Invalid message", errors=errors)
            elif said == "crash":
                answer("error", code="EXECUTION_ERROR", message="out of paper")
            else:
                observation = {"echo": said, "length": len(said), "metadata": {}}
                answer("observation", observation=observation, reward=len(said) / 10, done=said == "bye")


@pytest.fixture
def echo():
    server = Echo()
    with websockets.serve(server.serve, "127.0.0.1", 0, process_request=server.schema) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        server.url = f"http://127.0.0.1:{running.socket.getsockname()[1]}/base"
        yield server
        running.shutdown()


def source(echo, seed=0, **options):
    parsed = SPEC.parse_options({"url": echo.url, "action_field": "message", "observation_field": "echo", **options})
    return parsed, SPEC.tasks(parsed, seed)


def play(options, task, replies):
    async def episode():
        environment = SPEC.make(options, Outside())
        try:
            opening = await environment.reset(task)
            return opening, [await environment.step(reply) for reply in replies], environment
        finally:
            await environment.close()

    return asyncio.run(episode())


def test_replies_become_actions_and_observations_become_turns(echo):
    options, tasks = source(echo, reset={"level": 2}, action={"metadata": {}}, instructions="Talk.")
    task = tasks.task("train/0")
    opening, (first, last), _ = play(options, task, [" hello\n", "bye"])
    assert opening == (Message(Role.SYSTEM, "Talk."), Message(Role.USER, "ready"))
    assert first.observation == (Message(Role.USER, "hello"),)
    assert [(r.reward, r.terminated, r.truncated) for r in (first, last)] == [(0.5, False, False), (0.3, True, False)]
    assert echo.received == [
        {"type": "reset", "data": {"level": 2, "seed": task.data["seed"]}},
        {"type": "step", "data": {"metadata": {}, "message": "hello"}},
        {"type": "step", "data": {"metadata": {}, "message": "bye"}},
    ]


def test_whole_observations_and_actions_are_json(echo):
    options, tasks = source(echo, action_field=None, observation_field=None)
    opening, results, _ = play(options, tasks.task("train/0"), ['so: {"message": "hi"}', "hi", "[1]", "{" * 3000 + "}"])
    assert json.loads(opening[0].content) == {"echo": "ready", "length": 5}
    assert json.loads(results[0].observation[0].content) == {"echo": "hi", "length": 2}
    for malformed in results[1:]:
        assert malformed.observation == (Message(Role.USER, "error: write one action as a JSON object"),)
        assert malformed.info["reward_parts"] == {"malformed": 1.0}


def test_an_action_that_the_server_refuses_costs_a_turn(echo):
    options, tasks = source(echo, max_turns=2)
    _, results, _ = play(options, tasks.task("train/0"), ["bad", "bad"])
    told = "error: the OpenEnv server answered VALIDATION_ERROR: Invalid message message: too rude"
    assert [result.observation[0].content for result in results] == [told, told]
    assert [(r.reward, r.terminated, r.truncated) for r in results] == [(0.0, False, False), (0.0, False, True)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [("crash", "answered EXECUTION_ERROR: out of paper"), ("hang up", "answered CLOSED: the connection ended")],
)
def test_a_server_that_breaks_fails_the_rollout_with_its_reason(echo, reply, message):
    options, tasks = source(echo)
    with pytest.raises(OpenEnvError, match=message):
        play(options, tasks.task("train/0"), [reply])


def test_a_server_without_a_free_session_is_waited_for(echo):
    options, tasks = source(echo)
    echo.busy = 2
    opening, _, _ = play(options, tasks.task("train/0"), [])
    assert (opening[0].content, echo.busy) == ("ready", 0)


def test_splits_share_no_seed_and_a_fixed_number_goes_round(echo):
    _, tasks = source(echo)
    seeds = {split: {tasks.task(f"{split}/{n}").data["seed"] for n in range(200)} for split in ("train", "evaluation")}
    assert not seeds["train"] & seeds["evaluation"]
    assert source(echo, seed=1)[1].task("train/0").data != tasks.task("train/0").data
    _, few = source(echo, size=3)
    assert {few.key_at(position) for position in range(9)} == {"train/0", "train/1", "train/2"}
    assert few.epoch_size == 3
    with pytest.raises(KeyError):
        tasks.task("demonstration/0")


def test_the_range_of_returns_is_without_limit_unless_it_is_told(echo):
    options, tasks = source(echo)
    assert play(options, tasks.task("train/0"), [])[2].reward_range == (float("-inf"), float("inf"))
    told, _ = source(echo, reward_range=(-1, 1))
    assert play(told, tasks.task("train/0"), [])[2].reward_range == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action_field": "text"}, "got `text`; there are: message, metadata"),
        ({"action": {"txt": 1}}, "got `txt`; there are: message, metadata"),
        ({"url": "localhost:8000"}, "url must be an address such as http://localhost:8000: got 'localhost:8000'"),
        ({"url": "http://127.0.0.1:9/x"}, "no OpenEnv server answers at http://127.0.0.1:9/x"),
        ({"reward_range": (1, 1)}, "reward_range must hold the smaller number first: got (1.0, 1.0)"),
    ],
    ids=["action field", "action", "url", "no server", "range"],
)
def test_settings_that_cannot_work_are_named_in_one_line(echo, options, message):
    with pytest.raises(ConfigError) as caught:
        source(echo, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_observation_without_the_field_names_those_that_there_are(echo):
    options, tasks = source(echo, observation_field="text")
    with pytest.raises(ConfigError, match="got `text`; there are: echo, length, metadata"):
        play(options, tasks.task("train/0"), [])


def test_a_missing_package_says_which_extra_brings_it(echo, monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'sao-pipeline\[openenv\]'"):
        source(echo)
