"""Rendering with the templates of model families: what the renderer finds out, and ids against the template's text."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from template_families import EOS, FAMILIES, SENTENCEPIECE, SPECIAL_TOKENS, tokenizer_of

from sao_core.config import ConfigError
from sao_core.environments.tools import function
from sao_core.rollout.chat_template import explanation
from sao_core.rollout.renderer import Renderer
from sao_core.tool_calls import ToolCall, parse_tool_calls
from sao_core.trajectory import Message, Role

TOOLS = (function("python", "Runs Python.", code="What to run."),)
ASK, MORE = Message(Role.USER, "what is 1 plus 2"), Message(Role.USER, "and twice that?")
SYSTEM = Message(Role.SYSTEM, "You are a careful calculator.")
CALL = ToolCall("python", {"code": "print('1 + 2')"}, "abcde1234")
RESULT = Message(Role.TOOL, "3", {"name": "python", "tool_call_id": "abcde1234"})
ANSWER, LAST = Message(Role.ASSISTANT, "It is 3."), Message(Role.ASSISTANT, "Then 6.")

OWN_CALLS = ("qwen2_5", "qwen3", "qwen3_coder", "llama3_2", "mistral_v0_3", "mistral_small_3", "deepseek_v3_1")
"""Families whose template shows tools and writes calls."""
TEXT_ARGUMENTS = ("deepseek_v3_1",)
SINGLE_CALLS = ("llama3_2",)


@cache
def renderer_of(family: str) -> Renderer:
    return Renderer(tokenizer_of(family))


def calling(*calls: ToolCall, text: str = "") -> Message:
    told = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
        for c in calls
    ]
    return Message(Role.ASSISTANT, text, {"tool_calls": told})


def turn_of(family: str, message: Message) -> list[int]:
    """Ids of a turn that the policy samples in its family's own format, with the end of the turn."""
    ids, mask = renderer_of(family).conversation([ASK, message])
    return [token for token, on in zip(ids, mask, strict=True) if on]


def text_of(family: str, ids: list[int]) -> str:
    return str(tokenizer_of(family).decode(ids, skip_special_tokens=False))


def whole(family: str, messages: list[Message], tools: Any = None) -> list[int]:
    """What the template itself makes of a conversation, without any code of ours."""
    plain = [dict(message.as_dict()) for message in messages]
    if family in TEXT_ARGUMENTS:
        for message in plain:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = '{"code": "print(\'1 + 2\')"}'
    tokenizer = tokenizer_of(family)
    text = tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("family", OWN_CALLS)
def test_turn_after_turn_gives_what_the_template_makes_of_the_whole_tool_loop(family: str) -> None:
    renderer, called = renderer_of(family), calling(CALL)
    ids = renderer.prompt_ids([ASK], TOOLS)
    history = [ASK]
    for turn, observation in ((called, RESULT), (called, RESULT)):
        action = turn_of(family, turn)
        history.append(Message(Role.ASSISTANT, renderer.action_text(action)))
        extension = renderer.next_turn_ids(history, [observation], TOOLS)
        assert extension is not None
        ids += action + extension
        history.append(observation)
    assert ids == whole(family, [ASK, called, RESULT, called, RESULT], list(TOOLS))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("qwen3", "deepseek_r1")])
def test_turn_after_turn_gives_what_the_template_makes_of_the_whole_dialogue(family: str) -> None:
    renderer = renderer_of(family)
    first = turn_of(family, ANSWER)
    between = renderer.next_turn_ids([ASK, Message(Role.ASSISTANT, renderer.action_text(first))], [MORE])
    assert between is not None
    assert renderer.prompt_ids([ASK]) + first + between == whole(family, [ASK, ANSWER, MORE])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_that_ends_a_turn_is_found(family: str) -> None:
    expected = {
        "llama3_2": "<|eot_id|>",
        "gemma2": "<end_of_turn>",
        "phi4_mini": "<|end|>",
    }.get(family, SPECIAL_TOKENS[family][1])
    renderer, tokenizer = renderer_of(family), tokenizer_of(family)
    assert renderer.end_of_turn == expected
    eos = EOS.get(family, SPECIAL_TOKENS[family][1])
    assert renderer.stop_ids == set(tokenizer.convert_tokens_to_ids([expected, eos]))


REWRITTEN = {
    ("qwen3", "user", False): True,  # thinking goes when a user speaks
    ("qwen3", "tool", False): False,
    ("mistral_v0_3", "tool", True): False,
    ("mistral_v0_3", "user", True): True,  # tools stand before the last user message
    ("mistral_v0_3", "user", False): False,
    ("mistral_small_3", "user", True): False,
    ("llama3_2", "user", True): False,
    ("qwen2_5", "user", True): False,
    ("deepseek_r1", "user", False): True,  # the prompt opens thinking, history has none
    ("deepseek_r1", "tool", False): True,
    ("gemma2", "tool", True): False,
}


@pytest.mark.parametrize(("family", "kind", "tools"), REWRITTEN, ids=["-".join(map(str, case)) for case in REWRITTEN])
def test_a_template_that_rewrites_earlier_turns_is_found(family: str, kind: str, tools: bool) -> None:
    said = "<think>\n1 and 2\n</think>\n\n" if family in ("qwen3", "deepseek_r1") else ""
    said += renderer_of(family).action_text(turn_of(family, calling(CALL) if tools and kind == "tool" else ANSWER))
    observation = RESULT if kind == "tool" else MORE
    extension = renderer_of(family).next_turn_ids(
        [ASK, Message(Role.ASSISTANT, said)], [observation], TOOLS if tools else ()
    )
    assert (extension is None) == REWRITTEN[family, kind, tools]


def test_a_system_message_that_moves_is_found() -> None:
    """Mistral's first templates show it only while the user speaks last."""
    history = [SYSTEM, ASK, Message(Role.ASSISTANT, " It is 3.")]
    assert renderer_of("mistral_v0_3").next_turn_ids(history, [MORE]) is None
    assert renderer_of("mistral_small_3").next_turn_ids(history, [MORE]) is not None


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3_1"])
def test_a_turn_that_nothing_is_dropped_from_goes_on_in_its_segment(family: str) -> None:
    extension = renderer_of(family).next_turn_ids([ASK, ANSWER], [MORE])
    assert extension is not None
    assert renderer_of(family).prompt_ids([ASK]) + turn_of(family, ANSWER) + extension == renderer_of(
        family
    ).prompt_ids([ASK, ANSWER, MORE])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_written_in_the_models_own_format_and_read_back(family: str) -> None:
    renderer = renderer_of(family)
    written = renderer.action_text(turn_of(family, calling(CALL)))
    mark = {
        "qwen3_coder": "<function=python>",
        "llama3_2": '{"name": "python", "parameters": ',
        "mistral_v0_3": '[TOOL_CALLS] [{"name": "python", ',
        "mistral_small_3": "[TOOL_CALLS]python[ARGS]",
        "deepseek_v3_1": "<｜tool▁call▁begin｜>python<｜tool▁sep｜>",
    }.get(family, '<tool_call>\n{"name": "python", ')
    assert mark in written
    assert parse_tool_calls(written, TOOLS) == ("", (CALL,))
    if family == "mistral_v0_3":
        assert parse_tool_calls(written)[1][0].call_id == "abcde1234"


ODD = st.text(max_size=20) | st.text("\n \t\"'\\{}[]<>/|é😀\u200b\u00a0", max_size=12)


def is_written_alike(family: str, text: str) -> bool:
    """Whether a family's vocabulary and format have a place for ``text`` at all."""
    if family in SENTENCEPIECE and "▁" in text:
        return False
    return not (family == "qwen3_coder" and "</" in text)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=8)
@given(code=ODD, more=ODD)
@example(code="</tool_call>", more="</think>")
@example(code="\n", more='\\n"')
def test_any_arguments_survive_writing_encoding_decoding_and_reading(family: str, code: str, more: str) -> None:
    if not is_written_alike(family, code + more) or any(token in code + more for token in SPECIAL_TOKENS[family]):
        return
    call = ToolCall("python", {"code": code, "more": more})
    tools = (function("python", "Runs Python.", code="", more=""),)
    written = renderer_of(family).action_text(turn_of(family, calling(call)))
    assert parse_tool_calls(written, tools) == ("", (call,))


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=8)
@given(text=ODD)
def test_what_users_and_tools_say_is_in_the_ids_unchanged(family: str, text: str) -> None:
    if not is_written_alike(family, text):
        return
    renderer, framed = renderer_of(family), f"({text})"
    assert framed in text_of(family, renderer.prompt_ids([Message(Role.USER, framed)]))
    if family != "deepseek_r1":
        seen = text_of(family, renderer.observation_ids([Message(Role.TOOL, framed)]))
        assert (framed if family != "llama3_2" else json.dumps(framed, ensure_ascii=False)) in seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_prompt_shows_the_tools_once(family: str) -> None:
    shown = text_of(family, renderer_of(family).prompt_ids([SYSTEM, ASK], TOOLS))
    assert shown.count("Runs Python.") == 1
    assert shown.count(SYSTEM.content) == 1
    assert shown.count(ASK.content) == 1
    assert "Runs Python." not in text_of(family, renderer_of(family).prompt_ids([SYSTEM, ASK]))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OWN_CALLS])
def test_a_template_without_tools_explains_them_in_a_system_message(family: str) -> None:
    renderer = renderer_of(family)
    system = Message(Role.SYSTEM, f"{SYSTEM.content}\n\n{explanation(TOOLS)}")
    assert '"name": "python"' in system.content
    assert renderer.prompt_ids([SYSTEM, ASK], TOOLS) == renderer.prompt_ids([system, ASK])
    if family != "gemma2":
        assert renderer.prompt_ids([ASK], TOOLS) == whole(family, [Message(Role.SYSTEM, explanation(TOOLS)), ASK])


def test_a_template_without_system_role_has_it_before_the_first_question() -> None:
    merged = Message(Role.USER, f"{SYSTEM.content}\n\n{ASK.content}")
    assert renderer_of("gemma2").prompt_ids([SYSTEM, ASK]) == whole("gemma2", [merged])


@pytest.mark.parametrize("family", ["gemma2", "zephyr"])
def test_a_template_without_tool_role_has_results_as_one_user_message(family: str) -> None:
    """Gemma refuses the role, Zephyr drops it without a word."""
    as_user = Message(Role.USER, "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>")
    results = [RESULT, Message(Role.TOOL, "4")]
    assert renderer_of(family).prompt_ids([ASK, ANSWER, *results]) == whole(family, [ASK, ANSWER, as_user])
    ids = renderer_of(family).prompt_ids([ASK]) + turn_of(family, ANSWER) + renderer_of(family).observation_ids(results)
    assert ids == whole(family, [ASK, ANSWER, as_user])


def test_a_result_without_id_gets_one_where_the_template_wants_one() -> None:
    seen = text_of("mistral_v0_3", renderer_of("mistral_v0_3").observation_ids([Message(Role.TOOL, "3")]))
    assert seen == '[TOOL_RESULTS] {"content": 3, "call_id": "call00000"}[/TOOL_RESULTS]'
    seen = text_of("mistral_v0_3", renderer_of("mistral_v0_3").observation_ids([RESULT]))
    assert '"call_id": "abcde1234"' in seen


@pytest.mark.parametrize("family", ["mistral_v0_3", "mistral_small_3"])
def test_turns_that_are_calls_do_not_count_as_the_users_counterpart(family: str) -> None:
    """Sampled text is all that a rollout has; templates that count turns are told which of them were calls."""
    renderer = renderer_of(family)
    raw = Message(Role.ASSISTANT, renderer.action_text(turn_of(family, calling(CALL))))
    told = renderer.prompt_ids([ASK, raw, RESULT, ANSWER, MORE])
    assert told == whole(family, [ASK, calling(CALL), RESULT, ANSWER, MORE])
    broken = Message(Role.ASSISTANT, "[TOOL_CALLS] [{")
    shown = text_of(family, renderer.prompt_ids([ASK, broken, Message(Role.TOOL, "error"), ANSWER, MORE]))
    assert "<tool_response>\nerror\n</tool_response>" in shown


@pytest.mark.parametrize("family", [f for f in OWN_CALLS if f not in SINGLE_CALLS])
def test_two_calls_in_a_turn_are_read_back_in_order(family: str) -> None:
    two = ToolCall("python", {"code": "2"}, "abcde5678")
    written = renderer_of(family).action_text(turn_of(family, calling(CALL, two)))
    assert parse_tool_calls(written, TOOLS)[1] == (CALL, two)


def test_calls_that_a_template_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="single tool-calls"):
        turn_of("llama3_2", calling(CALL, CALL))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_demonstration_acts_in_its_calls_and_answers(family: str) -> None:
    told = Message(Role.USER, ASK.content, {"tools": list(TOOLS)})
    ids, mask = renderer_of(family).conversation([told, calling(CALL), RESULT, ANSWER])
    acted = [token for token, on in zip(ids, mask, strict=True) if on]
    calls = turn_of(family, calling(CALL)) if family != "deepseek_r1" else []
    assert acted[: len(calls)] == calls
    assert text_of(family, acted[len(calls) :]).strip() == f"It is 3.{renderer_of(family).end_of_turn}"
    if family in OWN_CALLS:
        end = tokenizer_of(family).encode(text_of(family, acted[len(calls) :]), add_special_tokens=False)
        assert ids == whole(family, [ASK, calling(CALL), RESULT], list(TOOLS)) + end


def test_a_demonstration_goes_on_after_the_last_turn_that_is_rewritten() -> None:
    thought = Message(Role.ASSISTANT, "<think>\nadd\n</think>\n\nIt is 3.")
    ids, mask = renderer_of("qwen3").conversation([ASK, thought, MORE, calling(CALL), RESULT, LAST])
    acted = text_of("qwen3", [token for token, on in zip(ids, mask, strict=True) if on])
    assert acted.startswith("<tool_call>")
    assert acted.endswith("Then 6.<|im_end|>")
    context = text_of("qwen3", ids[: mask.index(True)])
    assert "It is 3." in context
    assert "<think>" not in context
