"""The writing task with a judge behind an endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json

import pytest
from chat_server import serving

from infra import chat_models
from infra.chat_models import ChatFailed, HttpChatModels
from infra.settings import ChatKeys
from sao_core import environments
from sao_core.environments.writing.model_judge import JudgeFailed
from sao_core.outside import Outside

SPEC = environments.get("writing")
TEXT = "cute: whatever a judge may think of this one."


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(chat_models, "FIRST_PAUSE_S", 0.001)


def write(server, texts=(TEXT,), keys=ChatKeys(), **judge):
    """Rewards of some texts, judged side by side."""
    options = SPEC.parse_options({"judge": {"url": server.base_url, "model": "judge-1", **judge}})
    outside = Outside(chat_models=HttpChatModels(keys))
    source = SPEC.tasks(options, 0)

    async def one(position, text):
        environment = SPEC.make(options, outside)
        await environment.reset(source.task(source.key_at(position)))
        return (await environment.step(text)).reward

    async def all_of_them():
        return await asyncio.gather(*(one(position, text) for position, text in enumerate(texts)))

    return asyncio.run(all_of_them())


def test_texts_are_judged_by_the_model():
    def judge(body):
        text = json.loads(body["messages"][1]["content"])["text"]
        return json.dumps({"quality": int("good" in text), "style": "cute" if "sweet" in text else "none"})

    with serving(judge) as server:
        texts = [f"cute: {words} and so on it goes." for words in ("good sweet", "good sour", "bad sweet")]
        assert write(server, texts, ChatKeys("sk-1")) == [1.0, 0.0, 0.0]
    assert {headers["authorization"] for headers in server.headers} == {"Bearer sk-1"}
    assert {(body["model"], body["temperature"]) for body in server.bodies} == {("judge-1", 0.0)}


def test_a_judge_that_rambles_is_asked_again():
    with serving(["I like it!", (503, "busy"), '{"quality": 1, "style": "cute"}']) as server:
        assert write(server) == [1.0]
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 4]


def test_a_judge_that_never_answers_in_form_fails_the_rollout():
    with serving(["I like it!"]) as server, pytest.raises(JudgeFailed, match="in 2 attempts: Your answer must be"):
        write(server, attempts=2)
    assert len(server.bodies) == 2


@pytest.mark.parametrize("answers", [[(500, "broken")], [(401, "who are you?")]], ids=["broken", "no key"])
def test_a_judge_that_cannot_be_asked_fails_the_rollout(answers):
    with serving(answers) as server, pytest.raises(ChatFailed, match=r"/v1/chat/completions answered (500|401)"):
        write(server)


def test_a_judge_that_is_gone_fails_the_rollout():
    with serving(["unused"]) as server:
        pass
    with pytest.raises(ChatFailed, match="could not be reached"):
        write(server)
