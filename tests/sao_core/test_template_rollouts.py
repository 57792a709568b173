"""Whole rollouts with the templates of model families: what was sampled stands, changed history begins a segment."""

import asyncio
import json
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from parts_fixtures import Counting, StretchedEngine, play
from rollout_fixtures import ScriptedEngine, ScriptedEnvironment, over, request
from template_families import FAMILIES, SENTENCEPIECE, tokenizer_of

from sao_core.config import RolloutConfig
from sao_core.environments.base import StepResult, Task
from sao_core.environments.tools import function
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.parts import RolloutPart, Unfinished, join
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Role, Trajectory

TOOLS = (function("python", "Runs Python.", code="What to run."),)
LIMITS = RolloutConfig(max_turns=6, max_action_tokens=500, max_context_tokens=4096)
ASK = Message(Role.USER, "what is 1 plus 2")
RESULT = StepResult((Message(Role.TOOL, "3", {"name": "python", "tool_call_id": "abcde1234"}),))
MORE = StepResult((Message(Role.USER, "and twice that?"),))
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1 + 2"}}\n</tool_call>'


class WithTools(Counting):
    tools: ClassVar = TOOLS


def spoken(family: str, text: str) -> list[int]:
    tokenizer = tokenizer_of(family)
    return [*tokenizer.encode(text, add_special_tokens=False), Renderer(tokenizer).end_id]


def rollout(
    family: str, turns: list[list[int]], results: list[StepResult], environment: type[ScriptedEnvironment] = WithTools
) -> tuple[tuple[Trajectory, ...], ScriptedEngine]:
    engine = ScriptedEngine(turns, context=4096)
    renderer = Renderer(tokenizer_of(family))
    made = environment([*results, over(1.0)], (ASK,))
    return asyncio.run(
        run_rollout(request(), engine, made, Task("t", ""), renderer, LIMITS, environment_name="scripted", seed=1)
    ), engine


def text(family: str, ids: np.ndarray) -> str:
    return str(tokenizer_of(family).decode(ids, skip_special_tokens=False))


def odd_spelling(family: str, word: str) -> list[int]:
    """A word in single letters, which the tokenizer itself would never choose."""
    tokenizer = tokenizer_of(family)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in word]
    assert None not in ids
    assert tokenizer.encode(word, add_special_tokens=False) != ids
    return [*ids, Renderer(tokenizer).end_id]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_ids_pass_unchanged_through_every_family(family: str) -> None:
    """Decoding and encoding them again would give others (pitfall 1), in any turn and whatever is rewritten."""
    strange = odd_spelling(family, "answer")
    segments, _ = rollout(family, [strange, strange, strange], [RESULT, MORE])
    acted = [token for s in segments for token in s.token_ids[s.action_mask].tolist()]
    assert acted == strange * 3


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek_r1"])
def test_a_tool_loop_is_one_segment(family: str) -> None:
    call = '[TOOL_CALLS] [{"name": "python", "arguments": {"code": "1"}, "id": "abcde1234"}]'
    turn = spoken(family, call if "mistral" in family else CALL)
    segments, engine = rollout(family, [turn, turn, spoken(family, "3")], [RESULT, RESULT])
    assert len(segments) == 1
    assert engine.restarts == 0
    assert "Runs Python." in text(family, np.array(engine.heard[0]))


def test_thinking_stays_in_a_tool_loop_and_goes_when_the_user_speaks() -> None:
    """Qwen3 (pitfall 2): turn N+1 is no extension of turn N, so another segment begins, never a silent mismatch."""
    think = "<think>\nsecret\n</think>\n\n"
    turns = [spoken("qwen3", f"{think}{word}") for word in (CALL, "It is 3.", CALL, "Then 6.")]
    segments, engine = rollout("qwen3", turns, [RESULT, MORE, RESULT])
    assert [segment.num_turns for segment in segments] == [2, 2]
    assert engine.restarts == 1
    first, second = (text("qwen3", segment.token_ids) for segment in segments)
    assert first.count("secret") == 2
    context = second[: second.index("and twice that?")]
    assert "secret" not in context
    assert "It is 3." in context
    assert second.count("secret") == 2  # both turns since the user spoke
    assert all("Runs Python." in shown for shown in (first, second))
    assert segments[1].rewards[np.flatnonzero(segments[1].action_mask)[-1]] == 1.0


def test_turns_without_thinking_go_on_in_their_segment() -> None:
    segments, _ = rollout(
        "qwen3", [spoken("qwen3", "It is 3."), spoken("qwen3", "Then 6.")], [MORE], ScriptedEnvironment
    )
    assert len(segments) == 1


def test_thinking_in_other_words_than_the_template_writes_begins_a_segment() -> None:
    """The template would put line breaks into `<think>x</think>`, so history is not what was sampled."""
    turn = spoken("qwen3", "<think>x</think>It is 3.")
    segments, _ = rollout("qwen3", [turn, turn], [MORE], ScriptedEnvironment)
    assert len(segments) == 2


def test_tools_that_move_to_the_last_question_begin_a_segment() -> None:
    turn = spoken("mistral_v0_3", '[TOOL_CALLS] [{"name": "python", "arguments": {"code": "1"}, "id": "abcde1234"}]')
    segments, _ = rollout("mistral_v0_3", [turn, spoken("mistral_v0_3", " It is 3."), turn], [RESULT, MORE])
    first, second = (text("mistral_v0_3", segment.token_ids) for segment in segments)
    assert first.startswith("<s>[AVAILABLE_TOOLS]")
    assert second.startswith("<s>[INST] what is")
    assert second.count("[AVAILABLE_TOOLS]") == 1
    assert '"id": "abcde1234"}]</s>[TOOL_RESULTS] {"content": 3, "call_id": "abcde1234"}' in second


def stored(begun: Unfinished) -> Unfinished:
    """As from disk: extras are JSON there."""

    def again(message: Message) -> Message:
        return replace(message, extra=json.loads(json.dumps(dict(message.extra))))

    segments = tuple(replace(s, messages=tuple(map(again, s.messages))) for s in begun.segments)
    return replace(begun, segments=segments)


def test_a_rollout_that_goes_on_after_a_restart_still_has_the_ids_of_its_calls() -> None:
    """Mistral's template refuses a tool result without the id, and it is rendered again when the user speaks."""
    family, parts = "mistral_v0_3", list[RolloutPart]()
    call = spoken(family, '[TOOL_CALLS] [{"name": "python", "arguments": {"code": "1"}, "id": "abcde1234"}]')
    answer = spoken(family, " It is 3.")
    renderer = Renderer(tokenizer_of(family))
    results = [RESULT, MORE, over(1.0)]
    limits: dict[str, Any] = {"max_context_tokens": 4096, "max_action_tokens": 500, "renderer": renderer}

    def put(part: RolloutPart) -> bool:
        parts.append(part)
        return True

    def stretches() -> StretchedEngine:
        return StretchedEngine([call[:3], call[3:], answer[:2], answer[2:], call[:1], call[1:]], context=4096)

    whole = play(stretches(), WithTools(results), put=put, **limits)
    begun = stored(join([part for part in parts if part.pieces[-1].segment == 0]))
    assert begun.messages[2].extra == {"name": "python", "tool_call_id": "abcde1234"}
    left = [answer[begun.open_tokens :], call]
    again = play(ScriptedEngine(left, context=4096), WithTools(results[1:]), begun=begun, attempt=2, **limits)
    assert [s.token_ids.tolist() for s in again] == [s.token_ids.tolist() for s in whole]


def test_families_have_both_kinds_of_vocabulary() -> None:
    assert set(SENTENCEPIECE) < set(FAMILIES)
