"""One rollout, with a scripted engine and a scripted environment."""

import asyncio
from typing import Any

import numpy as np
import pytest
from rollout_fixtures import (
    REWRITING_TEMPLATE,
    TOKENIZER,
    Answer,
    ScriptedEngine,
    ScriptedEnvironment,
    heard,
    over,
    request,
    said,
    tokenizer_with,
)

from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments.base import StepResult, Task
from sao_core.protocols import Rollout
from sao_core.rollout.agent import AttemptFailed, run_rollout
from sao_core.rollout.engine import session_seed
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Outcome, Purpose, Role, Sampling

CALL, ANSWER = said("calc: 1+2"), said("answer: 3")
LIMITS = RolloutConfig(
    max_turns=4, max_action_tokens=64, max_context_tokens=512, step_timeout_s=5, rollout_timeout_s=30
)
RENDERER = Renderer(TOKENIZER)


def play(
    turns: list[list[int]],
    results: list[Answer],
    *,
    renderer: Renderer = RENDERER,
    engine: ScriptedEngine | None = None,
    opening: Any = None,
    asked: Any = None,
    **limits: Any,
) -> tuple[Rollout, ScriptedEngine, ScriptedEnvironment]:
    engine = engine or ScriptedEngine(turns)
    environment = ScriptedEnvironment(results, opening) if opening is not None else ScriptedEnvironment(results)
    rollout = asyncio.run(
        run_rollout(
            asked or request(4),
            engine,
            environment,
            Task("task-4", "2"),
            renderer,
            LIMITS.model_copy(update=limits),
            environment_name="scripted",
            seed=11,
        )
    )
    assert (environment.closed, engine.opened, engine.closed) == (1, 1, 1)
    return rollout, engine, environment


def test_a_rollout_is_recorded_token_by_token() -> None:
    (t,), engine, environment = play([CALL, ANSWER], [heard("3"), over(1.0, {"correct": 1.0})])
    prompt, between = RENDERER.prompt_ids(environment.opening), RENDERER.observation_ids([Message(Role.TOOL, "3")])
    assert t.token_ids.tolist() == prompt + CALL + between + ANSWER
    assert engine.heard == [prompt, between]
    assert environment.actions == ["calc: 1+2", "answer: 3"]
    on = [False] * len(prompt) + [True] * len(CALL) + [False] * len(between) + [True] * len(ANSWER)
    assert t.action_mask.tolist() == on
    expected = [-0.5 * (1 + i) for i in range(len(CALL))] + [-0.5 * (1 + i) for i in range(len(ANSWER))]
    assert t.behavior_logprobs[t.action_mask].tolist() == expected
    assert t.policy_versions.tolist() == [7 if action else -1 for action in on]
    assert [turn.role for turn in t.turns] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert [m.content for m in t.messages] == ["what is 1 plus 2", "calc: 1+2", "3", "answer: 3"]
    assert (t.outcome, t.stop_reason, t.score) == (Outcome.COMPLETED, "terminated", 1.0)
    assert (t.trajectory_id, t.run_id, t.request_number, t.attempt) == ("run-4-1-0", "run", 4, 1)
    assert (t.environment, t.environment_version, t.environment_seed) == ("scripted", "3", 11)
    assert (t.difficulty, t.renderer_hash, t.on_swap) == ("2", RENDERER.hash, "recompute")
    assert t.reward_parts == {"correct": 1.0}
    assert set(t.timings) == {"started_at", "duration_s", "environment_s", "generation_s"}


def test_sampled_ids_pass_through_unchanged_even_if_text_would_encode_differently() -> None:
    spelled = [*(TOKENIZER.convert_tokens_to_ids(letter) for letter in "answer:"), *said(" 3")]
    text = RENDERER.action_text(spelled)
    assert said(text) != spelled
    (t,), _, environment = play([spelled], [over(1.0)])
    assert t.token_ids[t.action_mask].tolist() == spelled
    assert environment.actions == [text]


def test_reward_lands_on_last_action_token() -> None:
    (t,), *_ = play([CALL, ANSWER], [heard("3", 0.0), over(1.0)])
    assert np.flatnonzero(t.rewards).tolist() == [t.num_tokens - 1]
    (t,), *_ = play([CALL, CALL], [heard("3"), StepResult((Message(Role.TOOL, "no"),), -0.5, truncated=True)])
    assert np.flatnonzero(t.rewards).tolist() == [np.flatnonzero(t.action_mask)[-1]]


def test_dense_rewards_land_on_the_last_action_token_of_their_turns_and_add_up() -> None:
    (t,), *_ = play([CALL, CALL, ANSWER], [heard("3", 0.25), heard("4", -0.5), over(1.0)])
    ends = [turn.stop - 1 for turn in t.turns if turn.role is Role.ASSISTANT]
    assert t.rewards[ends].tolist() == [0.25, -0.5, 1.0]
    assert t.rewards.sum() == t.score == 0.75


def test_reward_on_an_observation_at_the_end_would_be_seen() -> None:
    """The sequence ends in an observation when turns run out; the reward stays on the action before it."""
    (t,), *_ = play([CALL], [heard("3", 1.0)], max_turns=1)
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "max_turns")
    assert not t.action_mask[-1]
    assert np.flatnonzero(t.rewards).tolist() == [np.flatnonzero(t.action_mask)[-1]]


def test_padding_ids_that_the_policy_samples_are_actions_all_the_same() -> None:
    pad = TOKENIZER.pad_token_id
    (t,), *_ = play([[pad, pad, *ANSWER]], [over(1.0)])
    assert t.token_ids[t.action_mask].tolist() == [pad, pad, *ANSWER]


def test_the_token_limit_counts_over_turns_and_cuts_inside_one() -> None:
    (t,), _, environment = play([CALL, ANSWER], [heard("3")], max_action_tokens=len(CALL) + 2)
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "max_action_tokens")
    assert t.num_action_tokens == len(CALL) + 2
    assert environment.actions == ["calc: 1+2"]
    (t,), engine, _ = play([CALL, ANSWER], [heard("3")], max_action_tokens=len(CALL))
    assert (t.outcome, t.stop_reason, len(engine.heard)) == (Outcome.TRUNCATED, "max_action_tokens", 1)


def test_an_observation_that_does_not_fit_truncates() -> None:
    prompt = len(RENDERER.prompt_ids([Message(Role.USER, "what is 1 plus 2")]))
    (t,), *_ = play([CALL], [heard("1" * 50)], engine=ScriptedEngine([CALL], context=prompt + len(CALL) + 20))
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "max_context_tokens")
    assert t.num_tokens == prompt + len(CALL)


def test_the_environments_own_budget_truncates() -> None:
    (t,), *_ = play([CALL], [heard("3", truncated=True)])
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "environment")


async def never() -> StepResult:
    await asyncio.Event().wait()
    raise AssertionError


async def nothing() -> None:
    return


async def slow_failure() -> StepResult:
    raise TimeoutError("tool gave up")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (RuntimeError("sandbox lost"), "environment step raised RuntimeError: sandbox lost"),
        (never, "environment step took longer than rollout.step_timeout_s=0.05"),
        (slow_failure, "environment step raised TimeoutError: tool gave up"),
        (over(float("nan")), "environment step returned a reward of nan"),
        (over(2.0), "score 2.25 is outside the environment's range -1.0…1.0"),
        (heard("\ud800"), "environment gave a message whose content is no text"),
        (over("good"), "environment step returned a reward that is no number"),  # type: ignore[arg-type]
        (over(1.0, {"style": "good"}), "environment step returned a reward that is no number"),  # type: ignore[dict-item]
        (nothing, "environment step must return a StepResult"),
    ],
)
def test_what_the_environment_breaks_is_a_failed_rollout_with_its_reason(result: Any, reason: str) -> None:
    (t,), *_ = play([CALL, CALL], [heard("3", 0.25), result], step_timeout_s=0.05)
    assert t.outcome is Outcome.FAILED
    assert reason in t.stop_reason
    assert t.token_ids[t.action_mask].tolist() == CALL + CALL
    assert t.rewards.sum() == t.score


def test_a_rollout_that_runs_out_of_time_is_truncated_with_what_it_has() -> None:
    (t,), *_ = play([CALL], [never], rollout_timeout_s=0.05)
    assert (t.outcome, t.stop_reason) == (Outcome.TRUNCATED, "rollout_timeout")
    assert t.token_ids[t.action_mask].tolist() == CALL


@pytest.mark.parametrize(
    ("opening", "reason"),
    [
        (RuntimeError("no sandbox"), "environment reset raised RuntimeError: no sandbox"),
        (never, "environment reset took longer than rollout.step_timeout_s=0.05"),
        ((), "environment reset returned no messages"),
        ((Message(Role.USER, "1" * 600),), "leaves no room in rollout.max_context_tokens=512"),
    ],
)
def test_what_breaks_before_the_first_action_fails_the_attempt(opening: Any, reason: str) -> None:
    with pytest.raises(AttemptFailed, match=reason):
        play([CALL], [], opening=opening, step_timeout_s=0.05)


def test_a_template_that_rewrites_history_gives_segments_that_keep_the_sampled_ids() -> None:
    thought, answer = said("<think>1</think>calc: 1+2"), said("<think>2</think>answer: 3")
    renderer = Renderer(tokenizer_with(REWRITING_TEMPLATE))
    (first, second), engine, _ = play([thought, answer], [heard("3", 0.25), over(0.5)], renderer=renderer)
    assert engine.restarts == 1
    assert first.token_ids[first.action_mask].tolist() == thought
    assert second.token_ids[second.action_mask].tolist() == answer
    shown = TOKENIZER.decode(second.token_ids[~second.action_mask])
    assert shown == "<|user|>what is 1 plus 2<|end|><|assistant|>calc: 1+2<|end|><|tool|>3<|end|><|assistant|>"
    assert (first.segment, second.segment, first.num_segments, second.num_segments) == (0, 1, 2, 2)
    assert (first.rewards.sum(), second.rewards.sum(), first.score, second.score) == (0.25, 0.5, 0.75, 0.75)
    assert (first.trajectory_id, second.trajectory_id) == ("run-4-1-0", "run-4-1-1")


def test_a_rewriting_template_that_leaves_a_turn_alone_goes_on_in_one_segment() -> None:
    renderer = Renderer(tokenizer_with(REWRITING_TEMPLATE))
    (t,), engine, _ = play([CALL, ANSWER], [heard("3"), over(1.0)], renderer=renderer)
    assert (engine.restarts, t.num_segments, t.num_turns) == (0, 1, 2)


def test_a_segment_in_which_nothing_was_said_is_left_out() -> None:
    renderer = Renderer(tokenizer_with(REWRITING_TEMPLATE))
    (t,), *_ = play([said("<think>1</think>calc: 1+2")], [heard("3")], renderer=renderer, max_turns=1)
    assert (t.num_segments, t.stop_reason) == (1, "max_turns")


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=20), Sampling(greedy=True)])
def test_training_refuses_anything_but_the_policys_own_samples(sampling: Sampling) -> None:
    with pytest.raises(ConfigError, match="a train rollout must sample from the policy itself"):
        play([ANSWER], [over(1.0)], asked=request(sampling=sampling))
    (t,), *_ = play([ANSWER], [over(1.0)], asked=request(sampling=sampling, purpose=Purpose.EVALUATE))
    assert t.sampling == sampling


def test_sampling_depends_on_seed_request_and_attempt_only() -> None:
    seeds = [play([ANSWER], [over(1.0)], asked=asked)[1].seeds[0] for asked in (request(4), request(4), request(4, 2))]
    assert seeds == [session_seed(11, 4, 1), session_seed(11, 4, 1), session_seed(11, 4, 2)]
    assert len({session_seed(*key) for key in ((0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2), (0, 11, 1))}) == 5


def test_an_environment_that_fails_to_close_is_reported_and_the_rollout_stands(caplog: Any) -> None:
    class Sticky(ScriptedEnvironment):
        async def close(self) -> None:
            raise RuntimeError("still open")

    rollout = asyncio.run(
        run_rollout(
            request(),
            ScriptedEngine([ANSWER]),
            Sticky([over(1.0)]),
            Task("t", ""),
            RENDERER,
            LIMITS,
            environment_name="e",
            seed=0,
        )
    )
    assert rollout[0].score == 1.0
    assert "closing the environment failed: RuntimeError: still open" in caplog.text
