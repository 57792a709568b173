"""Chat models over HTTP, against a server on this machine that speaks the protocol."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from chat_server import completion, serving

from infra import chat_models
from infra.chat_models import ATTEMPTS, ChatFailed, HttpChatModels
from infra.settings import ChatKeys, SettingsError
from sao_core.trajectory import Message, Role

ASKED = (Message(Role.SYSTEM, "judge"), Message(Role.USER, "is it good?"))
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(chat_models, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(chat_models, "LONGEST_PAUSE_S", 0.01)


def ask(server, keys=ChatKeys(), timeout_s=5.0, **settings):
    model = HttpChatModels(keys).at(server.base_url, "judge-1", timeout_s=timeout_s)
    return asyncio.run(model.complete(ASKED, **settings))


def refusal(answers, keys=ChatKeys(), **settings):
    with serving(answers) as server, pytest.raises(ChatFailed) as caught:
        ask(server, keys, **settings)
    return str(caught.value), len(server.bodies)


def test_a_reply_comes_from_the_models_chat_completions():
    with serving(["yes"]) as server:
        assert ask(server, max_tokens=7, temperature=0.5) == "yes"
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies == [
        {
            "model": "judge-1",
            "messages": [{"role": "system", "content": "judge"}, {"role": "user", "content": "is it good?"}],
            "max_tokens": 7,
            "temperature": 0.5,
        }
    ]
    assert "authorization" not in server.headers[0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_endpoint_is_asked_again(status):
    with serving([(status, "busy"), (status, "busy"), "yes"]) as server:
        assert ask(server) == "yes"
    assert len(server.bodies) == 3


def test_an_endpoint_that_stays_busy_fails_after_a_bounded_number_of_attempts():
    message, asked = refusal([(503, {"error": "overloaded"})])
    assert message.endswith('/v1/chat/completions answered 503: {"error": "overloaded"} (asked 4 times)')
    assert asked == ATTEMPTS == 4


def test_a_retry_after_is_heeded_up_to_the_longest_pause(monkeypatch):
    monkeypatch.setattr(chat_models, "LONGEST_PAUSE_S", 0.3)
    with serving([(429, "slow down", {"Retry-After": "3600"}), "yes"]) as server:
        started = time.monotonic()
        assert ask(server) == "yes"
    assert 0.3 <= time.monotonic() - started < 3


def test_what_an_endpoint_refuses_is_not_asked_again():
    message, asked = refusal([(404, {"error": {"message": "no model judge-1"}})])
    assert "answered 404" in message
    assert "no model judge-1" in message
    assert asked == 1


def test_an_endpoint_that_nobody_serves_is_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    model = HttpChatModels(ChatKeys()).at(url, "judge-1")
    with pytest.raises(ChatFailed, match=r"could not be reached \(ConnectError: .*\(asked 4 times\)"):
        asyncio.run(model.complete(ASKED))


def test_an_endpoint_that_is_silent_counts_as_unreachable():
    def slow(body):
        time.sleep(0.3)
        return "too late"

    message, asked = refusal(slow, timeout_s=0.05)
    assert message.endswith("gave no answer within 0.05 s (asked 4 times)")
    assert asked <= ATTEMPTS


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<html>", "no chat completion: <html>"),
        ({"choices": []}, "no chat completion"),
        (completion(None), "without text"),
    ],
    ids=["no JSON", "no choice", "no text"],
)
def test_an_answer_that_is_no_reply_is_named(body, said):
    message, asked = refusal([(200, body)])
    assert said in message
    assert asked == 1


def test_models_that_take_other_parameters_get_those():
    def reasoning_model(body):
        for name in ("max_tokens", "temperature"):
            if name in body:
                return 400, {"error": {"code": "unsupported_parameter", "param": name}}
        return f"thought within {body['max_completion_tokens']}"

    with serving(reasoning_model) as server:
        models = HttpChatModels(ChatKeys())

        async def twice():
            return [await models.at(server.base_url, "judge-1").complete(ASKED, max_tokens=9) for _ in range(2)]

        assert asyncio.run(twice()) == ["thought within 9"] * 2
    assert len(server.bodies) == 4  # two refusals, two replies: it is learnt once


def test_connections_serve_one_event_loop_after_another():
    with serving(["yes"]) as server:
        model = HttpChatModels(ChatKeys()).at(server.base_url, "judge-1")
        assert [asyncio.run(model.complete(ASKED)) for _ in range(2)] == ["yes", "yes"]


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "https:///v1", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ChatFailed, match="must look like https://host/v1"):
        HttpChatModels(ChatKeys()).at(url, "judge-1")


def test_an_address_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ChatFailed, match="must carry no password: got one for host") as caught:
        HttpChatModels(ChatKeys()).at("https://user:hush@host/v1", "judge-1")
    assert "hush" not in str(caught.value)


def test_the_key_goes_into_the_header_and_nowhere_else(caplog):
    keys = ChatKeys.from_environment({"SAO_CHAT_API_KEY": f" {KEY}\n"})
    with serving(["yes"]) as server:
        ask(server, keys)
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    message, _ = refusal([(401, f"wrong key {KEY}")], keys)
    assert message.endswith("answered 401: wrong key (the key)")
    refusal([(500, f"wrong key {KEY}")], keys)
    assert KEY not in repr(keys) + caplog.text


def test_a_key_goes_only_to_its_place():
    keys = ChatKeys.from_environment(
        {"SAO_CHAT_API_KEYS": '{"api.one.com": "a", "two.com:8000": "b", "https://three.com/team": "c"}'}
    )
    places = {
        "https://api.one.com/v1": "a",
        "https://api.one.com.evil.org/v1": None,
        "http://two.com:8000/v1": "b",
        "http://two.com:9000/v1": None,
        "https://three.com/team/v1": "c",
        "https://three.com/teams/v1": None,
    }
    assert {url: keys.key_for(url) for url in places} == places
    assert ChatKeys("all", {"api.one.com": "a"}).key_for("http://two.com/v1") == "all"


@pytest.mark.parametrize("value", [f'{{"host": "{KEY}"', f'["{KEY}"]', '{"host": 7}'])
def test_keys_that_cannot_be_read_are_refused_without_showing_them(value):
    with pytest.raises(SettingsError, match="SAO_CHAT_API_KEYS must be a JSON object") as caught:
        ChatKeys.from_environment({"SAO_CHAT_API_KEYS": value})
    assert KEY not in str(caught.value)


def test_a_line_break_around_a_key_of_a_place_is_no_part_of_it():
    keys = ChatKeys.from_environment({"SAO_CHAT_API_KEYS": '{"judge": " a\\n"}'})
    assert keys.key_for("http://judge/v1") == "a"
