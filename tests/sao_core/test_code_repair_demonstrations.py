import asyncio
from itertools import groupby

import pytest
from code_repair_fixtures import SPEC, Subprocesses, bundled, environment
from rollout_fixtures import TOKENIZER, ScriptedEngine, request

from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments.code_repair.demonstrations import smallest_edit
from sao_core.outside import Outside
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.renderer import Renderer
from sao_core.tool_calls import calls_of, write_tool_calls
from sao_core.trajectory import Outcome, Role

COUNT = 3


def demonstrations(count, **options):
    return list(SPEC.demonstrations(SPEC.parse_options(options), 0, count))


def spoken(messages):
    return [calls_of(message.extra["tool_calls"]) for message in messages if message.role is Role.ASSISTANT]


@pytest.mark.parametrize(("rate", "reward"), [(1.0, 1.0), (0.0, 0.0)], ids=["right", "wrong"])
def test_a_demonstration_is_what_the_environment_would_have_shown(rate, reward):
    """Played in the environment, every turn is answered as the demonstration says, down to the test reports."""
    for number, messages in enumerate(demonstrations(COUNT, right_fix=[rate] * 3)):
        task = bundled(f"demonstration/{number}")

        async def episode(task=task, messages=messages):
            playing = environment(Subprocesses())
            opening = await playing.reset(task)
            results = [await playing.step(write_tool_calls(calls)) for calls in spoken(messages)]
            return opening, results

        opening, results = asyncio.run(episode())
        assert [m.content for m in opening] == [messages[0].content]
        observed = [(m.content, m.extra) for result in results for m in result.observation]
        told = [(m.content, m.extra) for m in messages if m.role is Role.TOOL]
        assert observed == told[: len(observed)]
        assert len(observed) == len(results) - 1
        assert results[-1].terminated
        assert results[-1].reward == reward
        assert all(result.info["reward_parts"]["malformed"] == 0 for result in results)


def test_it_looks_edits_tests_and_submits():
    calls = [[call.name for (call,) in spoken(messages)] for messages in demonstrations(6)]
    assert calls == [["list_files", "read_file", "replace_text", "run_tests", "submit"]] * 6


def test_the_right_fix_is_found_less_often_in_harder_tasks():
    rates = [[0, 0] for _ in range(3)]
    for number, messages in enumerate(demonstrations(36, right_fix=[0.9, 0.5, 0.1])):
        mistake = bundled(f"demonstration/{number}").data["repair"].mistake
        edit = spoken(messages)[2][0].arguments
        right = "old" in edit and mistake.wrong.replace(edit["old"], edit["new"]) == mistake.right
        rates[number % 3][0] += right
        rates[number % 3][1] += 1
    easy, medium, hard = (found / count for found, count in rates)
    assert easy > 0.7 > medium > 0.3 > hard


def test_the_prompt_shows_the_tools_unless_they_are_left_out():
    (shown,), (left_out,) = demonstrations(1), demonstrations(1, show_tools=False)
    assert {tool["function"]["name"] for tool in shown[0].extra["tools"]} > {"list_files", "submit"}
    assert "tools" not in left_out[0].extra


@pytest.mark.parametrize(
    ("before", "after", "edit"),
    [
        ("a\nb\nc", "a\nx\nc", ("b", "x")),
        ("a\nb\nb\nc", "a\nb\nx\nc", ("b\nb", "b\nx")),
        ("a\nb\nc", "a\nb\nnew\nc", ("b", "b\nnew")),
        ("a\nb\nc", "a\nc", ("b", "")),
        ("x\nx\ny", "z\nx\ny", ("x\nx", "z\nx")),
    ],
    ids=["line", "twice", "added", "lost", "first"],
)
def test_an_edit_is_as_small_as_tells_its_place(before, after, edit):
    old, new = smallest_edit(before, after)
    assert before.count(old) == 1
    if edit[1]:
        assert (old, new) == edit
        assert before.replace(old, new) == after


def test_rates_must_be_probabilities():
    with pytest.raises(ConfigError, match="right_fix must hold probabilities"):
        SPEC.parse_options({"right_fix": [0.5, 1.5, 0]})


def test_a_rollout_that_says_the_same_has_the_same_tokens_and_keeps_reward_and_patch():
    options = SPEC.parse_options({"right_fix": [1, 1, 1]})
    (messages,) = SPEC.demonstrations(options, 0, 1)
    renderer = Renderer(TOKENIZER)
    ids, mask = renderer.conversation(messages)
    turns = [[ids[i] for i in run] for said, run in groupby(range(len(ids)), lambda i: mask[i]) if said]
    limits = RolloutConfig(max_turns=8, max_action_tokens=1024, max_context_tokens=8192)
    rollout = asyncio.run(
        run_rollout(
            request(),
            ScriptedEngine(turns, context=8192),
            SPEC.make(options, Outside(code_runner=Subprocesses())),
            bundled("demonstration/0"),
            renderer,
            limits,
            environment_name="code_repair",
            seed=0,
        )
    )
    (trajectory,) = rollout
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.score == 1.0
    assert trajectory.token_ids.tolist() == ids
    assert trajectory.action_mask.tolist() == mask
    assert trajectory.reward_parts["solved"] == trajectory.reward_parts["edits"] == 1.0
    assert trajectory.reward_parts["tool_calls"] == 5.0
    assert trajectory.info["patch"].startswith("diff --git a/")
    assert trajectory.info["instance_id"] == "demonstration/0"
