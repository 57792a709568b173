"""The capturing endpoint over HTTP, asked by the real `openai` client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from rollout_fixtures import ScriptedEngine, said
from test_capture import ASK, CALL, FIRST, RENDERER, SECOND, TOOL, Calls, actions, tool

from infra import chat_http
from infra.capture import CaptureEndpoint
from infra.chat_requests import BadRequest, read_request
from sao_core.rollout.engine import EngineError
from sao_core.trajectory import Sampling

USER = {"role": "user", "content": ASK.content}
Ask = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


def served(calls: Calls, ask: Ask, retries: int = 0) -> Any:
    """What ``ask`` returns while the rollout is served."""

    async def run() -> Any:
        async with CaptureEndpoint().serving(calls.captured) as address:
            assert address.base_url.startswith("http://127.0.0.1:")
            async with openai.AsyncOpenAI(
                base_url=address.base_url, api_key=address.api_key, max_retries=retries
            ) as client:
                return await ask(client)

    return asyncio.run(run())


def create(**arguments: Any) -> Ask:
    return lambda client: client.chat.completions.create(**{"model": "policy", "messages": [USER]} | arguments)


def test_a_reply_is_what_the_policy_said_with_usage_and_version() -> None:
    calls = Calls([FIRST])
    got = served(calls, create(max_completion_tokens=50, temperature=1.0, top_p=1, n=1, seed=3, stop=None))
    choice = got.choices[0]
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "calc: 1+2", None)
    assert (choice.finish_reason, choice.logprobs, got.model) == ("stop", None, "policy")
    prompt = len(RENDERER.prompt_ids([ASK]))
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (prompt, len(FIRST))
    assert got.system_fingerprint == "version-7"
    assert actions(calls.rollout()[0]) == FIRST


def test_an_agents_loop_with_tools_is_one_segment() -> None:
    turn = said(f"so\n{CALL}")
    calls = Calls([turn, SECOND])

    async def agent(client: openai.AsyncOpenAI) -> str:
        messages: list[Any] = [USER]
        got = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = got.choices[0].message
        assert (got.choices[0].finish_reason, message.content) == ("tool_calls", "so")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        got = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        return str(got.choices[0].message.content)

    assert served(calls, agent) == "answer: 3"
    (t,) = calls.rollout()
    assert t.token_ids.tolist()[-len(SECOND) - len(between := RENDERER.observation_ids([tool("3")], [TOOL])) :] == (
        between + SECOND
    )
    assert actions(t) == turn + SECOND


@pytest.mark.parametrize("usage", [True, False], ids=["usage", "no usage"])
def test_a_streamed_reply_adds_up_to_the_same(usage: bool) -> None:
    calls = Calls([said(CALL)])

    async def agent(client: openai.AsyncOpenAI) -> Any:
        options: Any = {"stream_options": {"include_usage": True}} if usage else {}
        async with client.chat.completions.stream(model="policy", messages=[USER], tools=[TOOL], **options) as stream:
            return await stream.get_final_completion()

    got = served(calls, agent)
    (call,) = got.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert got.choices[0].finish_reason == "tool_calls"
    assert (got.usage.completion_tokens == len(said(CALL))) if usage else got.usage is None


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    content = served(Calls([FIRST]), create(logprobs=True)).choices[0].logprobs.content
    assert "".join(piece.token for piece in content) == "calc: 1+2"
    assert [piece.logprob for piece in content] == [-0.5 * (1 + i) for i in range(len(FIRST))]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": 0.2}, "temperature must be 1, as this run samples, or be left out: got 0.2"),
        ({"temperature": []}, r"temperature must be 1, as this run samples, or be left out: got \[\]"),
        ({"top_p": 0.9}, "top_p must be 1: replies are plain samples"),
        ({"n": 2}, "n must be 1: ask again"),
        ({"logit_bias": {"5": 100}}, "logit_bias must be empty"),
        ({"presence_penalty": 0.5}, "presence_penalty must be 0"),
        ({"frequency_penalty": 0.5}, "frequency_penalty must be 0"),
        ({"stop": ["\n"]}, "stop must be empty: the policy ends its turns itself"),
        ({"response_format": {"type": "json_object"}}, "response_format must be text"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs must be 0"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls must be true"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice must be auto or none"),
        ({"extra_body": {"top_k": 20}}, "top_k is not supported: leave it out"),
        ({"max_tokens": 0}, "max_tokens must be a whole number over 0: got 0"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "function", "content": "x"}]}, "role must be one of system, user, assistant, tool"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            r"messages\[0\]: content must be text",
        ),
    ],
    ids=lambda value: next(iter(value)) + "-" + str(len(str(value))) if isinstance(value, dict) else "",
)
def test_what_would_change_the_samples_is_refused_and_says_why(asked: dict[str, Any], reason: str) -> None:
    calls = Calls([])
    with pytest.raises(openai.BadRequestError, match=reason):
        served(calls, create(**asked), retries=2)
    assert calls.engine.heard == []


def test_a_greedy_evaluation_may_be_asked_for_as_temperature_0() -> None:
    body = json.dumps({"messages": [USER], "temperature": 0}).encode()
    assert read_request(body, Sampling(greedy=True)).messages == (ASK,)
    with pytest.raises(BadRequest, match="temperature must be 1"):
        read_request(body, Sampling())


def test_content_in_parts_and_developers_are_read() -> None:
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "1 plus 2"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "refusal": None}]
    read = read_request(json.dumps({"messages": messages}).encode(), Sampling()).messages
    assert [(m.role, m.content) for m in read] == [("system", "be brief"), ("user", ASK.content)]


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    body = json.dumps({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}).encode()
    assert read_request(body, Sampling()).tools == ()


def test_unknown_keys_models_and_paths_are_refused() -> None:
    async def agent(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            await create(model="gpt")(client)
        with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
            await client.responses.create(model="policy", input="x")
        with pytest.raises(openai.AuthenticationError, match="no rollout has this API key"):
            await create()(client.with_options(api_key="sk-other"))
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").models.list()

    served(Calls([]), agent)


def test_two_rollouts_are_told_apart_by_their_keys() -> None:
    one, two = Calls([FIRST]), Calls([SECOND])

    async def run() -> list[str]:
        endpoint = CaptureEndpoint()
        async with endpoint.serving(one.captured) as first, endpoint.serving(two.captured) as second:
            assert first.base_url == second.base_url
            assert first.api_key != second.api_key
            clients = [openai.AsyncOpenAI(base_url=a.base_url, api_key=a.api_key) for a in (first, second)]
            got = await asyncio.gather(*(create()(client) for client in clients))
            return [reply.choices[0].message.content for reply in got]

    assert asyncio.run(run()) == ["calc: 1+2", "answer: 3"]


def test_a_call_after_the_end_is_told_so_and_not_repeated() -> None:
    calls = Calls([FIRST, SECOND])

    async def run() -> None:
        endpoint = CaptureEndpoint()
        async with endpoint.serving(calls.captured) as address:
            client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=5)
            await create()(client)
        with pytest.raises(openai.APIStatusError, match="this rollout has ended") as over:
            await create()(client)
        assert (over.value.status_code, over.value.code) == (410, "rollout_over")

    asyncio.run(run())
    assert len(calls.engine.heard) == 1


def test_a_limit_is_told_with_its_setting() -> None:
    calls = Calls([FIRST], max_turns=1)

    async def agent(client: openai.AsyncOpenAI) -> None:
        await create()(client)
        with pytest.raises(openai.APIStatusError, match=r"rollout\.max_turns=1 is reached"):
            await create()(client)

    served(calls, agent)


def test_a_conversation_that_does_not_fit_has_the_code_that_agents_know() -> None:
    calls = Calls([], engine=ScriptedEngine([FIRST], context=8), max_context_tokens=8)
    with pytest.raises(openai.BadRequestError, match="leave no room") as refused:
        served(calls, create())
    assert refused.value.code == "context_length_exceeded"


def test_a_retry_of_the_client_gets_the_first_answer() -> None:
    calls = Calls([FIRST, SECOND])

    async def agent(client: openai.AsyncOpenAI) -> list[str]:
        headers = {"x-stainless-retry-count": "1"}
        got = [await create()(client), await create(extra_headers=headers)(client)]
        return [reply.choices[0].message.content for reply in got]

    assert served(calls, agent) == ["calc: 1+2", "calc: 1+2"]
    assert len(calls.engine.heard) == 1


def test_a_broken_engine_is_an_error_that_is_not_asked_again() -> None:
    class Broken(ScriptedEngine):
        tried = 0

        async def extend_and_sample(self, *arguments: Any) -> Any:
            self.tried += 1
            raise EngineError("broken weights")

    calls = Calls([], engine=Broken([], context=4096))
    with pytest.raises(openai.InternalServerError, match="the policy cannot answer: EngineError: broken weights"):
        served(calls, create(), retries=3)
    assert calls.engine.tried == 1  # type: ignore[attr-defined]


def test_bodies_are_bounded_and_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_http, "BODY_BYTES", 1000)

    async def agent(client: openai.AsyncOpenAI) -> None:
        url, headers = f"{client.base_url}chat/completions", {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient() as plain:
            half = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
            refused = (
                (b"x" * 1001, 413, "request_too_large"),
                (b"{", 400, "invalid_json"),
                (half, 400, "invalid_json"),
            )
            for body, status, code in refused:
                got = await plain.post(url, content=body, headers=headers)
                assert (got.status_code, got.json()["error"]["code"]) == (status, code)

    served(Calls([]), agent)


def test_a_waiting_call_blocks_nobody() -> None:
    class Waiting(ScriptedEngine):
        async def extend_and_sample(self, *arguments: Any) -> Any:
            await asyncio.Event().wait()

    slow, quick = Calls([], engine=Waiting([], context=4096)), Calls([FIRST])

    async def run() -> None:
        endpoint = CaptureEndpoint()
        async with endpoint.serving(slow.captured) as one, endpoint.serving(quick.captured) as two:
            first, second = (
                openai.AsyncOpenAI(base_url=a.base_url, api_key=a.api_key, max_retries=0) for a in (one, two)
            )
            waiting = asyncio.ensure_future(create()(first))
            got = await asyncio.wait_for(create()(second), 5)
            assert got.choices[0].message.content == "calc: 1+2"
            slow.captured.close()
            with pytest.raises(openai.APIStatusError, match="has ended"):
                await waiting

    asyncio.run(run())
