"""Messages to token ids through a tokenizer's chat template, one direction only.

What the policy sampled is never rendered again: an observation is rendered to ids on its own and appended.
Whether a template allows that (later turns leave earlier ones as they were) is found by a probe at the start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from sao_core.config import ConfigError
from sao_core.trajectory import Message, Role

_ASKED = Message(Role.USER, "ping")
_SAID = Message(Role.ASSISTANT, "pong")
_THOUGHT = Message(Role.ASSISTANT, "<think>\nping, so pong\n</think>\n\npong")


class Renderer:
    """One tokenizer and its chat template.

    ``end_of_turn`` is the text of the token that ends a turn of the policy, ``stop_ids`` the ids at which sampling
    stops. ``extends_history`` says that a conversation's next turn always continues the tokens of the turn before;
    where it is False, :meth:`extension_ids` decides turn by turn. Raises :class:`ConfigError` if the tokenizer has
    no chat template, or nothing that could end a turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; give a model folder whose tokenizer has one")
        self._tokenizer = tokenizer
        end = self._find_end_of_turn()
        self.end_of_turn = str(tokenizer.convert_ids_to_tokens(end))
        self._end_id = end
        self.stop_ids = frozenset({end} if tokenizer.eos_token_id is None else {end, int(tokenizer.eos_token_id)})
        self._head = self._text([_ASKED], open_turn=True) + _SAID.content + self.end_of_turn
        self.extends_history = all(self._probe(*probe) for probe in _probes())

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of tokenizer and template: trajectories with different ones do not mix."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else {"vocab": self._tokenizer.get_vocab()}
        for setting_of_a_call in ("padding", "truncation"):
            rules.pop(setting_of_a_call, None)
        text = json.dumps([rules, self._tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The whole conversation, ready for the policy's next turn."""
        return self._encode(self._text(messages, open_turn=True))

    def observation_ids(self, observation: Sequence[Message]) -> list[int]:
        """What the template puts between the policy's end-of-turn token and its next turn.

        Raises :class:`ConfigError` if the template would change earlier turns; see :meth:`extension_ids`.
        """
        text = self._text([_ASKED, _SAID, *observation], open_turn=True)
        if not text.startswith(self._head):
            raise ConfigError("the chat template rewrites earlier turns, so observations cannot be rendered alone")
        return self._encode(text[len(self._head) :])

    def extension_ids(self, history: Sequence[Message], observation: Sequence[Message]) -> list[int] | None:
        """The same for a template that may rewrite earlier turns; None where it does.

        ``history`` is the conversation up to and including the policy's last turn, whose tokens stand as sampled.
        """
        head = self._text(history[:-1], open_turn=True) + history[-1].content + self.end_of_turn
        text = self._text([*history, *observation], open_turn=True)
        return self._encode(text[len(head) :]) if text.startswith(head) else None

    def next_turn_ids(self, history: Sequence[Message], observation: Sequence[Message]) -> list[int] | None:
        """Ids to append to a rollout's tokens after ``history``, or None if a new segment has to start."""
        return self.observation_ids(observation) if self.extends_history else self.extension_ids(history, observation)

    def action_text(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn without the token that ended it: for environments and people only."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A demonstration as ``(ids, action_mask)`` of equal length, laid out like the tokens of a rollout.

        The mask covers what the policy would sample: its words and the end-of-turn token. Messages after the last
        assistant turn are dropped. Where the template rewrites history, earlier turns are context and only the last
        turn is an action. Raises :class:`ValueError` without an assistant turn, or with two in a row.
        """
        turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
        if not turns or turns[0] == 0:
            raise ValueError("a demonstration needs messages that end in an assistant turn after a prompt")
        if any(after - before == 1 for before, after in pairwise(turns)):
            raise ValueError("a demonstration has two assistant turns in a row")
        if not self.extends_history:
            turns = turns[-1:]
        ids = self.prompt_ids(messages[: turns[0]])
        mask = [False] * len(ids)
        for position, turn in enumerate(turns):
            if position:
                between = self.observation_ids(messages[turns[position - 1] + 1 : turn])
                ids += between
                mask += [False] * len(between)
            action = [*self._encode(messages[turn].content), self._end_id]
            ids += action
            mask += [True] * len(action)
        return ids, mask

    def _find_end_of_turn(self) -> int:
        """The first special token that the template puts after an assistant's words, else the tokenizer's eos."""
        closed = self._text([_ASKED, _SAID], open_turn=False)
        tail = closed[closed.rindex(_SAID.content) + len(_SAID.content) :]
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        for token in self._encode(tail):
            if token in special:
                return token
        if self._tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no special token and the tokenizer has no eos token")
        return int(self._tokenizer.eos_token_id)

    def _probe(self, said: Message, observation: Message) -> bool:
        try:
            return self.extension_ids([_ASKED, said], [observation]) is not None
        except ConfigError:
            return True  # a role that the template refuses says nothing about history; using it is an error then

    def _text(self, messages: Sequence[Message], open_turn: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [message.as_dict() for message in messages], tokenize=False, add_generation_prompt=open_turn
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of roles {roles}: {error}") from error
        return str(rendered)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _probes() -> list[tuple[Message, Message]]:
    """Turns that templates are known to rewrite: plain and thinking ones, before a user and before a tool."""
    return [(said, Message(role, "ping")) for said in (_SAID, _THOUGHT) for role in (Role.USER, Role.TOOL)]
