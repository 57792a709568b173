import asyncio
from pathlib import Path

import pytest

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

SPEC = get("verifiers")


@pytest.fixture(autouse=True)
def _tasksets_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def source(verifiers_python):
    def make(taskset="riddles", seed=0, **options):
        parsed = SPEC.parse_options({"taskset": taskset, "python": verifiers_python, **options})
        return parsed, SPEC.tasks(parsed, seed)

    return make


def judge(options, task, *replies):
    async def episodes():
        return await asyncio.gather(*(episode(reply) for reply in replies))

    async def episode(reply):
        environment = SPEC.make(options, Outside())
        try:
            await environment.reset(task)
            return await environment.step(reply)
        finally:
            await environment.close()

    return asyncio.run(episodes())


def test_the_rewards_of_the_taskset_score_a_reply(source):
    options, tasks = source()
    task = tasks.task("task/4")
    assert task.data["messages"] == (Message(Role.SYSTEM, "Add."), Message(Role.USER, "4 + 4"))
    right, long, wrong = judge(options, task, "8", "it must be 8, I think", "9")
    assert [result.reward for result in (right, long, wrong)] == [pytest.approx(x) for x in (1.0, 0.0, 0.1)]
    assert right.terminated
    assert right.info["reward_parts"] == {"right": 0.9, "short": pytest.approx(0.1), "turns": 1.0, "messages": 3.0}


def test_the_version_is_that_of_the_other_python(source):
    options, _ = source()
    assert SPEC.make(options, Outside()).version == "1+0.4.0"


def test_a_finite_taskset_is_split_and_goes_round(source):
    options, tasks = source(held_out_fraction=0.2, difficulty="level")
    held_out = tasks.evaluation_keys(100)
    epochs = [[tasks.key_at(position) for position in range(start, start + 16)] for start in (0, 16)]
    assert (len(held_out), tasks.epoch_size) == (4, 16)
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert set(held_out) | set(epochs[0]) == {f"task/{n}" for n in range(20)}
    assert {tasks.task(key).difficulty for key in epochs[0]} == {"0", "1", "2"}
    with pytest.raises(KeyError):
        tasks.task("task/20")
    assert SPEC.tasks(options, 0).evaluation_keys(2) == held_out[:2]


def test_an_endless_taskset_holds_out_every_eighth_task(source):
    _, tasks = source(config={"endless": True})
    training = [tasks.key_at(position) for position in range(70)]
    assert training[:9] == [f"task/{n}" for n in (0, 1, 2, 3, 4, 5, 6, 8, 9)]
    assert tasks.evaluation_keys(2) == ["task/7", "task/15"]
    assert not set(training) & set(tasks.evaluation_keys(20))
    assert tasks.epoch_size is None
    assert tasks.task("task/79").data["messages"][1].content == "79 + 79"


def test_a_scorer_that_raises_fails_the_rollout_with_its_reason(source):
    options, tasks = source()
    with pytest.raises(RuntimeError, match=r"could not score: TaskError: .*the scorer broke"):
        judge(options, tasks.task("task/1"), "crash")
    assert judge(options, tasks.task("task/1"), "2")[0].reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("taskset", "message"),
    [
        ("no_such_taskset", "`no_such_taskset` cannot be used: ModuleNotFoundError"),
        ("refused_container", "its tasks need a container"),
        ("refused_setup", "its tasks have a `setup`, which needs a runtime of verifiers"),
        ("refused_tools", "its tasks have tools, which run as servers of verifiers"),
        ("refused_runtime", "its reward `passes` needs a runtime of verifiers"),
        ("refused_silent", "its tasks have no reward"),
        ("refused_player", "it is played by an environment of its own, Player"),
    ],
)
def test_a_taskset_that_needs_more_than_a_conversation_is_refused_in_one_line(source, taskset, message):
    with pytest.raises(ConfigError) as caught:
        source(taskset)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_setting_of_the_taskset_and_a_wrong_field_are_named(source):
    with pytest.raises(ConfigError, match=r"cannot be used: ValidationError: .*counts"):
        source(config={"counts": 3})
    _, tasks = source(difficulty="levels")
    with pytest.raises(ConfigError, match=r"got `levels`; there are: .*answer, level"):
        tasks.task("task/0")
