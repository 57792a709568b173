"""One tokenizer's chat template, with what it can and cannot do found by probes, never by the model's name.

Messages become what the template takes: where it refuses a system message, it goes in front of the first user message;
where it refuses tool results, they are user messages in `<tool_response>`; where it has no tools or writes calls that
:mod:`sao_core.tool_calls` cannot read, a system message explains tools in Hermes format. Nothing here makes ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from jinja2 import TemplateError

from sao_core.config import ConfigError
from sao_core.tool_calls import MalformedToolCall, ToolCall, Tools, calls_of, parse_tool_calls, write_tool_calls
from sao_core.trajectory import Message, Role

ASKED = Message(Role.USER, "ping")
SAID = Message(Role.ASSISTANT, "pong")
_CALL = ToolCall("probe_function", {"text": "ping"}, "probe0001")
PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "probe_function",
            "description": "Says pong.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    },
)
_MARK = "probe words"
_ID = "call00000"
"""Mistral's templates refuse ids that have other than nine letters and digits."""

_EXPLANATION = (
    "You may call functions. Their signatures are:\n<tools>\n{signatures}\n</tools>\n\n"
    "To call one, write a JSON object with its name and arguments:\n"
    '<tool_call>\n{{"name": NAME, "arguments": {{ARGUMENT: VALUE}}}}\n</tool_call>'
)


class _ToolRole(Enum):
    """How tool results are given to the template."""

    PLAIN = auto()
    WITH_ID = auto()
    AS_USER = auto()


class ChatTemplate:
    """Renders conversations to text. Raises :class:`ConfigError` if there is no template or nothing ends a turn.

    ``end_of_turn`` (token ``end_id``) ends a turn of the policy. ``writes_calls`` says that the template shows tools
    and writes calls in a format that is read back; if not, both are Hermes in plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; give a model folder whose tokenizer has one")
        self._tokenizer = tokenizer
        self._takes_system, self._tool_role, self._structures = True, _ToolRole.PLAIN, False
        self.writes_calls, self._arguments_as_text = True, False
        self._takes_system = self._shows([Message(Role.SYSTEM, _MARK), ASKED])
        self._tool_role = self._find_tool_role()
        self.end_id = self._find_end_of_turn()
        self.end_of_turn = str(tokenizer.convert_ids_to_tokens(self.end_id))
        self.writes_calls = self._find_calls()
        self._structures = self._find_structures()

    def text(self, messages: Sequence[Message], tools: Tools = (), *, open_turn: bool) -> str:
        """The conversation as the template writes it; ``open_turn`` opens the policy's next turn."""
        shown = list(tools) if tools and self.writes_calls else None
        view = self._view(messages, tools)
        try:
            rendered = self._tokenizer.apply_chat_template(
                view, tools=shown, tokenize=False, add_generation_prompt=open_turn
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of roles {roles}: {error}") from error
        return str(rendered)

    def tail(self, history: Sequence[Message], observation: Sequence[Message], tools: Tools = ()) -> str | None:
        """What follows the end-of-turn token of ``history``'s last message, a turn of the policy, up to its next turn.

        None if the template writes anything before that otherwise than the policy read and wrote it. White space at
        the ends of a turn, which templates trim, does not count.
        """
        prompt = self.text(history[:-1], tools, open_turn=True)
        whole = self.text([*history, *observation], tools, open_turn=True)
        if not whole.startswith(prompt):
            return None
        rest, said = whole[len(prompt) :].lstrip(), history[-1].content.strip()
        if not rest.startswith(said):
            return None
        rest = rest[len(said) :].lstrip()
        return rest[len(self.end_of_turn) :] if rest.startswith(self.end_of_turn) else None

    def before(self, observation: Sequence[Message]) -> Message:
        """A turn of the policy that ``observation`` may follow in this template."""
        if self._structures and any(message.role is Role.TOOL for message in observation):
            return Message(Role.ASSISTANT, self.turn_text(_calling([_CALL])))
        return SAID

    def turn_text(self, message: Message) -> str:
        """What the policy would write for an assistant message: white space and calls as the template writes them.

        Raises :class:`ConfigError` for calls that the template refuses, e.g. two in one turn.
        """
        calls, content = _calls_in(message), message.content
        if calls and self.writes_calls:
            result = Message(Role.TOOL, _MARK, {"name": calls[0].name, "tool_call_id": _id_of(calls[0], 0)})
            written = self._written([ASKED, message, result], PROBE_TOOLS)
            if written is None:
                raise ConfigError("the chat template does not write a tool call where the policy would")
            return written
        if calls:
            return write_tool_calls(calls, content)
        written = self._written([ASKED, message])
        return written if written is not None and written.strip() == content.strip() else content

    def _written(self, conversation: Sequence[Message], tools: Tools = ()) -> str | None:
        """The second message as it stands between the policy's generation prompt and the end of its turn."""
        prompt = self.text(conversation[:1], tools, open_turn=True)
        whole = self.text(conversation, tools, open_turn=False)
        end = whole.find(self.end_of_turn, len(prompt))
        return whole[len(prompt) : end] if whole.startswith(prompt) and end >= 0 else None

    def _shows(self, messages: Sequence[Message], mark: str = _MARK, tools: Tools = ()) -> bool:
        try:
            return mark in self.text(messages, tools, open_turn=True)
        except ConfigError:
            return False

    def _find_tool_role(self) -> _ToolRole:
        result = Message(Role.TOOL, _MARK)
        for role in (_ToolRole.PLAIN, _ToolRole.WITH_ID):
            self._tool_role = role
            for said in (SAID, _calling([_CALL])):
                if self._shows([ASKED, said, result]):
                    return role
        return _ToolRole.AS_USER

    def _find_end_of_turn(self) -> int:
        """The first special token that the template puts after an assistant's words, else the tokenizer's eos."""
        closed = self.text([ASKED, SAID], open_turn=False)
        tail = closed[closed.rindex(SAID.content) + len(SAID.content) :]
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        for token in self._tokenizer.encode(tail, add_special_tokens=False):
            if token in special:
                return int(token)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no special token and the tokenizer has no eos token")
        return int(self._tokenizer.eos_token_id)

    def _find_calls(self) -> bool:
        """Whether tools are shown and a call is written so that it is read back; learns how arguments are given."""
        if not self._shows([ASKED], _CALL.name, PROBE_TOOLS):
            return False
        for self._arguments_as_text in (False, True):
            try:
                read = parse_tool_calls(self.turn_text(_calling([_CALL])), PROBE_TOOLS)
            except (ConfigError, MalformedToolCall):
                continue
            if read == ("", (_CALL,)):
                return True
        return False

    def _find_structures(self) -> bool:
        """Whether the template must be told which turns are calls, since it counts turns without them."""
        if not self.writes_calls:
            return False
        raw = Message(Role.ASSISTANT, self.turn_text(_calling([_CALL])))
        last = Message(Role.USER, _MARK)
        result = Message(Role.TOOL, "pong", {"name": _CALL.name, "tool_call_id": _CALL.call_id})
        told = [[ASKED, turn, result, SAID, last] for turn in (raw, _calling([_CALL]))]
        return not self._shows(told[0]) and self._shows(told[1])

    def _view(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """The conversation as the template takes it."""
        if tools and not self.writes_calls:
            messages = _with_system(messages, explanation(tools))
        if not self._takes_system:
            messages = _without_system(messages)
        view: list[dict[str, Any]] = []
        for message in messages:
            if message.role is Role.ASSISTANT:
                view.append(self._said(message))
            elif message.role is not Role.TOOL:
                view.append(_as_dict(message))
            elif self._tool_role is _ToolRole.AS_USER or (self._structures and not _answers_a_call(view)):
                _append_as_user(view, message)
            else:
                given = {} if self._tool_role is _ToolRole.PLAIN else {"tool_call_id": _ID}
                view.append({**given, **_as_dict(message)})
        return view

    def _said(self, message: Message) -> dict[str, Any]:
        calls, content = _calls_in(message), message.content
        if not calls and self._structures:
            with suppress(MalformedToolCall):  # no call then, and the message about it is no tool result
                content, calls = parse_tool_calls(content)
        if not calls:
            return _as_dict(message)
        if not self.writes_calls:
            return {"role": "assistant", "content": write_tool_calls(calls, content)}
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {
                    "id": _id_of(call, index),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": _as_json(call.arguments) if self._arguments_as_text else dict(call.arguments),
                    },
                }
                for index, call in enumerate(calls)
            ],
        }


def explanation(tools: Tools) -> str:
    """How a system message explains tools to a model whose template cannot."""
    return _EXPLANATION.format(signatures="\n".join(map(_as_json, tools)))


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_dict(message: Message) -> dict[str, Any]:
    """The tools of a demonstration are given to the template by themselves."""
    return {key: value for key, value in message.as_dict().items() if key != "tools"}


def _id_of(call: ToolCall, index: int) -> str:
    return call.call_id or f"call{index:05d}"


def _calling(calls: Sequence[ToolCall]) -> Message:
    written = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return Message(Role.ASSISTANT, "", {"tool_calls": written})


def _calls_in(message: Message) -> tuple[ToolCall, ...]:
    """The ``tool_calls`` of a message, as OpenAI writes them."""
    given = message.extra.get("tool_calls")
    return tuple(calls_of(given)) if given else ()


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """``text`` in the system message, after what stands there."""
    if messages and messages[0].role is Role.SYSTEM:
        return [Message(Role.SYSTEM, f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message(Role.SYSTEM, text), *messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """System messages in front of the user message that follows; the last ones become a user message."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role is Role.SYSTEM:
            waiting.append(message.content)
        elif waiting and message.role is Role.USER:
            merged.append(Message(Role.USER, "\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            merged.append(message)
    return [*merged, Message(Role.USER, "\n\n".join(waiting))] if waiting else merged


def _answers_a_call(view: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool result that comes now follows calls, perhaps after the results of others."""
    for message in reversed(view):
        if message["role"] != Role.TOOL:
            return "tool_calls" in message
    return False


def _append_as_user(view: list[dict[str, Any]], message: Message) -> None:
    """A tool result as a user message; results in a row share one, since templates want users to alternate."""
    content = f"<tool_response>\n{message.content}\n</tool_response>"
    if view and view[-1].get("role") == Role.USER and view[-1]["content"].startswith("<tool_response>\n"):
        view[-1] = {**view[-1], "content": f"{view[-1]['content']}\n{content}"}
    else:
        view.append({"role": "user", "content": content})
