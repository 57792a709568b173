import pytest
from rollout_fixtures import END, REWRITING_TEMPLATE, TOKENIZER, said, tokenizer_with

from sao_core.config import ConfigError
from sao_core.models.tiny import CHAT_TEMPLATE
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Role

ASK = Message(Role.USER, "what is 1 plus 2")
CALL = Message(Role.ASSISTANT, "calc: 1+2")
TOOL = Message(Role.TOOL, "3")
ANSWER = Message(Role.ASSISTANT, "answer: 3")
NEWLINES = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def text(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


def test_prompt_ends_where_the_policy_speaks() -> None:
    assert text(Renderer(TOKENIZER).prompt_ids([ASK])) == "<|user|>what is 1 plus 2<|end|><|assistant|>"


def test_an_observation_is_what_stands_between_two_turns() -> None:
    assert text(Renderer(TOKENIZER).observation_ids([TOOL])) == "<|tool|>3<|end|><|assistant|>"


def test_text_after_the_end_of_turn_token_belongs_to_the_observation() -> None:
    renderer = Renderer(tokenizer_with(NEWLINES))
    assert renderer.extends_history
    assert text(renderer.observation_ids([TOOL])) == "\n<|tool|>\n3<|end|>\n<|assistant|>\n"


def test_turn_after_turn_gives_the_ids_of_the_whole_conversation() -> None:
    renderer = Renderer(tokenizer_with(NEWLINES))
    pieces = renderer.prompt_ids([ASK]) + said("calc: 1+2") + renderer.observation_ids([TOOL])
    assert pieces == renderer.prompt_ids([ASK, CALL, TOOL])


def test_conversation_masks_the_words_and_the_end_of_each_assistant_turn() -> None:
    renderer = Renderer(TOKENIZER)
    ids, mask = renderer.conversation([ASK, CALL, TOOL, ANSWER, Message(Role.USER, "find 1")])
    assert [token for token, on in zip(ids, mask, strict=True) if on] == said("calc: 1+2") + said("answer: 3")
    assert text(ids) == (
        "<|user|>what is 1 plus 2<|end|><|assistant|>calc: 1+2<|end|><|tool|>3<|end|><|assistant|>answer: 3<|end|>"
    )


@pytest.mark.parametrize("messages", [[ASK], [ANSWER], [ASK, CALL, ANSWER]])
def test_conversation_refuses_what_no_rollout_looks_like(messages: list[Message]) -> None:
    with pytest.raises(ValueError, match="assistant turn"):
        Renderer(TOKENIZER).conversation(messages)


def test_a_template_that_rewrites_history_is_found_at_start() -> None:
    assert Renderer(TOKENIZER).extends_history
    assert not Renderer(tokenizer_with(REWRITING_TEMPLATE)).extends_history


def test_a_generation_prompt_that_history_lacks_counts_as_rewriting() -> None:
    opened = CHAT_TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
    assert not Renderer(tokenizer_with(opened)).extends_history


def test_a_rewriting_template_is_asked_turn_by_turn() -> None:
    renderer = Renderer(tokenizer_with(REWRITING_TEMPLATE))
    thought = Message(Role.ASSISTANT, "<think>3</think>calc: 1+2")
    assert renderer.extension_ids([ASK, thought], [TOOL]) is None
    kept = renderer.next_turn_ids([ASK, CALL], [TOOL])
    assert kept is not None
    assert text(kept) == "<|tool|>3<|end|><|assistant|>"


def test_a_rewriting_template_trains_on_the_last_turn_of_a_demonstration() -> None:
    def acted(first: Message) -> list[int]:
        ids, mask = Renderer(tokenizer_with(REWRITING_TEMPLATE)).conversation([ASK, first, TOOL, ANSWER])
        return [token for token, on in zip(ids, mask, strict=True) if on]

    assert acted(Message(Role.ASSISTANT, "<think>3</think>calc: 1+2")) == said("answer: 3")
    assert acted(CALL) == said("calc: 1+2") + said("answer: 3")


def test_an_action_is_decoded_without_its_end_and_nothing_else_is_dropped() -> None:
    renderer = Renderer(TOKENIZER)
    assert renderer.action_text(said(" calc: 1+2 ")) == " calc: 1+2 "
    assert renderer.action_text(said("<|tool|>3")) == "<|tool|>3"
    assert renderer.action_text([]) == ""


def test_stop_ids_hold_the_end_of_turn_and_the_eos() -> None:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    tokenizer.eos_token = "<|pad|>"
    assert Renderer(tokenizer).stop_ids == {END, tokenizer.pad_token_id}
    assert Renderer(tokenizer).end_of_turn == "<|end|>"


def test_a_tokenizer_without_template_or_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer_with(""))
    tokenizer = tokenizer_with("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos token"):
        Renderer(tokenizer)


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    refuse = "{% if messages|length > 2 and messages[-1]['role'] == 'system' %}{{ raise_exception('late') }}{% endif %}"
    renderer = Renderer(tokenizer_with(refuse + CHAT_TEMPLATE))
    with pytest.raises(ConfigError, match="roles user, assistant, system: late"):
        renderer.observation_ids([Message(Role.SYSTEM, "play")])


def test_hash_changes_with_the_template_and_not_with_how_the_tokenizer_was_used() -> None:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    before = Renderer(tokenizer).hash
    tokenizer(["a", "what is 1"], padding=True, truncation=True, max_length=4)
    assert Renderer(tokenizer).hash == before == Renderer(TOKENIZER).hash
    assert Renderer(tokenizer_with(NEWLINES)).hash != before
