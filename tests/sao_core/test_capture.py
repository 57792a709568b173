"""Calls of a program, answered by a scripted engine: what becomes one segment, and what does not."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rollout_fixtures import REWRITING_TEMPLATE, TOKENIZER, ScriptedEngine, request, said, tokenizer_with

from sao_core.agent_programs import CallRefused, Completion, FinishReason, RolloutOver
from sao_core.config import RolloutConfig
from sao_core.protocols import Rollout
from sao_core.rollout.capture import CapturedRollout
from sao_core.rollout.engine import EngineError, Sampled, StopReason
from sao_core.rollout.recorder import Circumstances, Recorder
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Outcome, Role, Sampling

RENDERER = Renderer(TOKENIZER)
LIMITS = RolloutConfig(max_turns=8, max_action_tokens=200, max_context_tokens=4096, rollout_timeout_s=30)
ASK = Message(Role.USER, "what is 1 plus 2")
OTHER = Message(Role.USER, "what is 3 times 4")
FIRST, SECOND, THIRD, FOURTH = (said(text) for text in ("calc: 1+2", "answer: 3", "calc: 3*4", "answer: 12"))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Calls:
    """A rollout whose program is the test."""

    def __init__(
        self,
        turns: Sequence[Sequence[int]],
        *,
        renderer: Renderer = RENDERER,
        engine: ScriptedEngine | None = None,
        timeout_s: float = 30,
        **limits: Any,
    ) -> None:
        self.engine = engine or ScriptedEngine(turns, context=4096)
        limits_ = LIMITS.model_copy(update=limits)
        self.recorder = Recorder(request(4), Circumstances("recompute", renderer.hash, "external", "1", 0, ""))
        session = self.engine.open(Sampling(), 0)
        deadline = time.monotonic() + timeout_s
        self.captured = CapturedRollout(session, renderer, limits_, self.recorder, Sampling(), deadline)

    async def __call__(self, *messages: Message, **arguments: Any) -> Completion:
        return await self.captured.complete(messages, **arguments)

    def rollout(self, score: float = 1.0) -> Rollout:
        self.recorder.reward(score)
        return self.recorder.rollout(Outcome.COMPLETED, "terminated", {})


def reply(completion: Completion, **changes: Any) -> Message:
    """The assistant's message as a client sends it back."""
    message = completion.as_message()
    return Message(Role.ASSISTANT, **{"content": message.content, "extra": message.extra} | changes)


def tool(text: str, call_id: str = "") -> Message:
    return Message(Role.TOOL, text, {"tool_call_id": call_id} if call_id else {})


def actions(trajectory: Any) -> list[int]:
    ids: list[int] = trajectory.token_ids[trajectory.action_mask].tolist()
    return ids


def test_calls_that_extend_the_history_are_one_segment_with_exactly_the_sampled_ids() -> None:
    spelled = [*(TOKENIZER.convert_tokens_to_ids(letter) for letter in "calc:"), *said(" 1+2")]
    assert said(RENDERER.action_text(spelled)) != spelled
    calls = Calls([spelled, SECOND])

    async def program() -> None:
        one = await calls(ASK)
        two = await calls(ASK, reply(one), tool("3"))
        assert (one.text, two.text) == ("calc: 1+2", "answer: 3")
        assert (two.prompt_tokens, two.token_ids, two.version) == (len(prompt + spelled + between), tuple(SECOND), 7)

    prompt, between = RENDERER.prompt_ids([ASK]), RENDERER.observation_ids([tool("3")])
    asyncio.run(program())
    (t,) = calls.rollout()
    assert t.token_ids.tolist() == prompt + spelled + between + SECOND
    assert actions(t) == spelled + SECOND
    assert calls.engine.heard == [prompt, between]
    assert t.behavior_logprobs[t.action_mask].tolist() == [
        -0.5 * (1 + i) for turn in (spelled, SECOND) for i in range(len(turn))
    ]
    assert [m.content for m in t.messages] == [ASK.content, "calc: 1+2", "3", "answer: 3"]
    assert np.flatnonzero(t.rewards).tolist() == [t.num_tokens - 1]


def test_an_edited_history_begins_a_segment_in_which_earlier_turns_are_only_context() -> None:
    calls = Calls([FIRST, SECOND, FOURTH])

    async def program() -> None:
        one = await calls(ASK)
        two = await calls(ASK, reply(one), tool("3"))
        await calls(ASK, reply(one), tool("4"))
        assert two.text == "answer: 3"

    asyncio.run(program())
    first, second = calls.rollout(0.75)
    assert (actions(first), actions(second)) == (FIRST + SECOND, FOURTH)
    assert (first.rewards.sum(), second.rewards.sum(), first.score, second.score) == (0.0, 0.75, 0.75, 0.75)
    assert np.flatnonzero(second.rewards).tolist() == [second.num_tokens - 1]
    shown = TOKENIZER.decode(second.token_ids[~second.action_mask])
    assert shown == f"<|user|>{ASK.content}<|end|><|assistant|>calc: 1+2<|end|><|tool|>4<|end|><|assistant|>"
    assert [m.content for m in first.messages] == [ASK.content, "calc: 1+2", "3", "answer: 3", "4", "answer: 12"]


def test_two_agents_that_take_turns_keep_a_segment_each() -> None:
    calls = Calls([FIRST, THIRD, SECOND, FOURTH])

    async def program() -> None:
        one, two = await calls(ASK), await calls(OTHER)
        await calls(ASK, reply(one), tool("3"))
        await calls(OTHER, reply(two), tool("12"))

    asyncio.run(program())
    first, second = calls.rollout()
    for trajectory, asked, turns, result in (
        (first, ASK, (FIRST, SECOND), "3"),
        (second, OTHER, (THIRD, FOURTH), "12"),
    ):
        between = RENDERER.observation_ids([tool(result)])
        assert trajectory.token_ids.tolist() == RENDERER.prompt_ids([asked]) + turns[0] + between + turns[1]
        assert actions(trajectory) == turns[0] + turns[1]
    assert calls.engine.heard[2] == first.token_ids[: -len(SECOND)].tolist()
    assert calls.engine.restarts == 4
    assert (first.rewards.sum(), second.rewards.sum()) == (0.0, 1.0)


def test_parallel_calls_take_turns_and_lose_nothing() -> None:
    class Slow(ScriptedEngine):
        running = 0

        async def extend_and_sample(self, *arguments: Any) -> Sampled:
            self.running += 1
            assert self.running == 1, "two calls sample in one session at a time"
            await asyncio.sleep(0.01)
            sampled = await super().extend_and_sample(*arguments)
            self.running -= 1
            return sampled

    calls = Calls([], engine=Slow([FIRST, SECOND, FOURTH], context=4096))

    async def program() -> list[Completion]:
        return await asyncio.gather(calls(ASK), calls(ASK), calls(OTHER))

    texts = [completion.text for completion in asyncio.run(program())]
    assert sorted(texts) == ["answer: 12", "answer: 3", "calc: 1+2"]
    assert [actions(t) for t in calls.rollout()] == [FIRST, SECOND, FOURTH]


def test_a_call_that_a_client_repeats_gets_the_answer_that_it_never_read() -> None:
    calls = Calls([FIRST, SECOND])

    async def program() -> None:
        assert (await calls(ASK, again=True)).text == "calc: 1+2"
        assert (await calls(ASK, again=True)).text == "calc: 1+2"
        assert (await calls(ASK)).text == "answer: 3"

    asyncio.run(program())
    assert [actions(t) for t in calls.rollout()] == [FIRST, SECOND]


def test_tool_calls_are_read_and_come_back_in_any_spelling() -> None:
    turn = said(f"let me see\n{CALL}")
    calls = Calls([turn, SECOND])

    async def program() -> None:
        one = await calls(ASK, tools=(TOOL,))
        assert (one.text, one.finish_reason) == ("let me see", FinishReason.TOOL_CALLS)
        (call,) = one.tool_calls
        assert (call.name, call.arguments) == ("add", {"a": 1})
        assert len(call.call_id) == 9
        written = {"id": "another", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        back = reply(one, content="let me see\n", extra={"tool_calls": [written]})
        two = await calls(ASK, back, tool("3", call.call_id), tools=(TOOL,))
        assert (two.finish_reason, two.tool_calls) == (FinishReason.STOP, ())

    asyncio.run(program())
    (t,) = calls.rollout()
    assert actions(t) == turn + SECOND
    assert "let me see\n" + CALL in [m.content for m in t.messages]


@pytest.mark.parametrize("tools", [(TOOL,), ()], ids=["malformed", "no tools"])
def test_what_is_no_readable_call_stays_text(tools: Any) -> None:
    text = CALL if not tools else CALL.replace("}}", "}")
    completion = asyncio.run(Calls([said(text)])(ASK, tools=tools))
    assert (completion.text, completion.tool_calls, completion.finish_reason) == (text, (), FinishReason.STOP)


def test_other_tools_begin_another_segment() -> None:
    calls = Calls([FIRST, SECOND])

    async def program() -> None:
        one = await calls(ASK)
        await calls(ASK, reply(one), tool("3"), tools=(TOOL,))

    asyncio.run(program())
    assert [actions(t) for t in calls.rollout()] == [FIRST, SECOND]


def test_a_template_that_rewrites_history_gives_segments_that_keep_the_sampled_ids() -> None:
    thought = said("<think>1</think>calc: 1+2")
    calls = Calls([thought, SECOND], renderer=Renderer(tokenizer_with(REWRITING_TEMPLATE)))

    async def program() -> None:
        one = await calls(ASK)
        assert one.text == "<think>1</think>calc: 1+2"
        await calls(ASK, reply(one), tool("3"))

    asyncio.run(program())
    first, second = calls.rollout()
    assert (actions(first), actions(second)) == (thought, SECOND)
    assert "<think>" not in TOKENIZER.decode(second.token_ids)


def test_a_turn_that_the_program_cuts_is_closed_by_a_token_that_nobody_trains() -> None:
    calls = Calls([FIRST, SECOND])

    async def program() -> None:
        one = await calls(ASK, max_tokens=3)
        assert (one.finish_reason, one.token_ids) == (FinishReason.LENGTH, tuple(FIRST[:3]))
        await calls(ASK, reply(one), tool("3"))

    asyncio.run(program())
    (t,) = calls.rollout()
    between = [RENDERER.end_id, *RENDERER.observation_ids([tool("3")])]
    assert t.token_ids.tolist() == RENDERER.prompt_ids([ASK]) + FIRST[:3] + between + SECOND
    assert actions(t) == FIRST[:3] + SECOND
    assert calls.captured.limit is None


def test_the_token_budget_cuts_a_reply_and_refuses_the_next_call() -> None:
    calls = Calls([FIRST, SECOND], max_action_tokens=len(FIRST) + 1)

    async def program() -> None:
        one = await calls(ASK)
        two = await calls(ASK, reply(one), tool("3"))
        assert (two.finish_reason, two.token_ids) == (FinishReason.LENGTH, tuple(SECOND[:1]))
        assert calls.captured.limit == "max_action_tokens"
        with pytest.raises(RolloutOver, match=f"rollout.max_action_tokens={len(FIRST) + 1} is reached"):
            await calls(ASK)

    asyncio.run(program())
    assert actions(calls.rollout()[0]) == FIRST + SECOND[:1]


def test_turns_and_time_end_a_rollout_too() -> None:
    async def program(calls: Calls, limit: str) -> None:
        if limit == "max_turns":
            await calls(ASK)
        with pytest.raises(RolloutOver, match=f"rollout.{limit}"):
            await calls(ASK)
        assert calls.captured.limit == limit

    asyncio.run(program(Calls([FIRST], max_turns=1), "max_turns"))
    asyncio.run(program(Calls([FIRST], timeout_s=-1), "rollout_timeout"))


def test_a_conversation_that_is_too_long_is_refused_and_a_shorter_one_goes_on() -> None:
    room = len(RENDERER.prompt_ids([ASK])) + len(FIRST) + 20
    calls = Calls([], engine=ScriptedEngine([FIRST, SECOND, FOURTH], context=room), max_context_tokens=room)

    async def program() -> None:
        one = await calls(ASK)
        with pytest.raises(CallRefused, match="leave no room") as refused:
            await calls(ASK, reply(one), tool("1" * 50))
        assert (refused.value.code, calls.captured.limit) == ("context_length_exceeded", "max_context_tokens")
        await calls(ASK, reply(one), tool("3"))
        assert calls.captured.limit is None
        await calls(OTHER)

    asyncio.run(program())
    first, second = calls.rollout()
    assert actions(first) == FIRST + SECOND
    assert actions(second) == FOURTH


def test_what_the_template_refuses_is_told_to_the_program() -> None:
    template = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template += "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    template += "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    calls = Calls([FIRST], renderer=Renderer(tokenizer_with(template)))
    with pytest.raises(CallRefused, match="too many"):
        asyncio.run(calls(ASK, Message(Role.ASSISTANT, "no"), ASK))


def test_a_call_under_way_at_the_end_is_told_so_and_leaves_no_trace() -> None:
    class Endless(ScriptedEngine):
        async def extend_and_sample(self, *arguments: Any) -> Sampled:
            if self.turns:
                return await super().extend_and_sample(*arguments)
            await asyncio.Event().wait()
            raise AssertionError

    calls = Calls([], engine=Endless([FIRST], context=4096))

    async def program() -> None:
        one = await calls(ASK)
        waiting = [asyncio.create_task(calls(ASK, reply(one), tool("3"))), asyncio.create_task(calls(OTHER))]
        await asyncio.sleep(0.01)
        assert calls.captured.quiet_since is None
        calls.captured.close()
        for task in waiting:
            with pytest.raises(RolloutOver, match="has ended"):
                await task
        assert calls.captured.quiet_since is not None

    asyncio.run(program())
    (t,) = calls.rollout()
    assert t.token_ids.tolist() == RENDERER.prompt_ids([ASK]) + FIRST


def test_a_reply_that_runs_out_of_time_counts_with_what_it_has() -> None:
    class Late(ScriptedEngine):
        async def extend_and_sample(self, *arguments: Any) -> Sampled:
            sampled = await super().extend_and_sample(*arguments)
            return Sampled(sampled.token_ids[:2], sampled.logprobs[:2], sampled.versions[:2], StopReason.DEADLINE)

    calls = Calls([], engine=Late([FIRST], context=4096))
    completion = asyncio.run(calls(ASK))
    assert (completion.finish_reason, calls.captured.limit) == (FinishReason.LENGTH, "rollout_timeout")
    assert actions(calls.rollout()[0]) == FIRST[:2]


def test_a_broken_engine_is_kept_for_the_worker_and_answers_nothing_more() -> None:
    class Broken(ScriptedEngine):
        async def extend_and_sample(self, *arguments: Any) -> Sampled:
            raise EngineError("broken weights")

    calls = Calls([], engine=Broken([], context=4096))

    async def program() -> None:
        with pytest.raises(EngineError):
            await calls(ASK)
        with pytest.raises(RolloutOver):
            await calls(ASK)

    asyncio.run(program())
    assert isinstance(calls.captured.failure, EngineError)
