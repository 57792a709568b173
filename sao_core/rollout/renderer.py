"""Messages to token ids through a tokenizer's chat template, one direction only.

What the policy sampled is never rendered again: an observation is rendered to ids on its own and appended.
Whether a template allows that (later turns leave earlier ones as they were) is found by a probe at the start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

from sao_core.config import ConfigError
from sao_core.rollout.chat_template import ASKED, PROBE_TOOLS, SAID, ChatTemplate
from sao_core.tool_calls import Tools
from sao_core.trajectory import Message, Role

THOUGHT = Message(Role.ASSISTANT, "<think>\nping, so pong\n</think>\n\npong")
"""Templates of reasoning models drop the thinking of turns that are over."""


class _Kind(NamedTuple):
    """What decides in known templates whether an observation leaves earlier turns as they were."""

    only_tools: bool
    """It is nothing but tool results: thinking stays as long as no user speaks."""
    tools: bool
    """The prompt shows tools: Mistral's stand before the last user message, wherever that is."""
    system: bool
    """There is a system message: Mistral's is shown while the user speaks last."""

    @classmethod
    def of(cls, history: Sequence[Message], observation: Sequence[Message], tools: Tools) -> _Kind:
        only_tools = bool(observation) and all(message.role is Role.TOOL for message in observation)
        return cls(only_tools, bool(tools), history[0].role is Role.SYSTEM)


class Renderer:
    """One tokenizer and its chat template.

    ``end_of_turn`` is the text of the token ``end_id``, which ends a turn of the policy; ``stop_ids`` end its sampling.
    ``extends_history`` says that a conversation's next turn always continues the tokens of the turn before; where it
    is False, :meth:`extension_ids` decides turn by turn for observations of the kinds that may not. Raises
    :class:`ConfigError` if the tokenizer has no chat template, or nothing that could end a turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self.end_of_turn, end = self._template.end_of_turn, self._template.end_id
        self.end_id = end
        self.stop_ids = frozenset({end} if tokenizer.eos_token_id is None else {end, int(tokenizer.eos_token_id)})
        self._extends = {kind: self._probe(kind) for kind in map(_Kind._make, product((True, False), repeat=3))}
        self.extends_history = all(self._extends.values())

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of tokenizer and template: trajectories with different ones do not mix."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else {"vocab": self._tokenizer.get_vocab()}
        for setting_of_a_call in ("padding", "truncation"):
            rules.pop(setting_of_a_call, None)
        text = json.dumps([rules, self._tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The whole conversation, ready for the policy's next turn; the prompt shows ``tools``."""
        return self._encode(self._template.text(messages, tools, open_turn=True))

    def observation_ids(self, observation: Sequence[Message], tools: Tools = ()) -> list[int]:
        """What the template puts between the policy's end-of-turn token and its next turn.

        Raises :class:`ConfigError` if the template would change earlier turns; see :meth:`extension_ids`.
        """
        tail = self._template.tail([ASKED, self._template.before(observation)], observation, tools)
        if tail is None:
            raise ConfigError("the chat template rewrites earlier turns, so observations cannot be rendered alone")
        return self._encode(tail)

    def extension_ids(
        self, history: Sequence[Message], observation: Sequence[Message], tools: Tools = ()
    ) -> list[int] | None:
        """The same for a template that may rewrite earlier turns; None where it does.

        ``history`` is the conversation up to and including the policy's last turn, whose tokens stand as sampled.
        """
        tail = self._template.tail(history, observation, tools)
        return None if tail is None else self._encode(tail)

    def next_turn_ids(
        self, history: Sequence[Message], observation: Sequence[Message], tools: Tools = ()
    ) -> list[int] | None:
        """Ids to append to a rollout's tokens after ``history``, or None if a new segment has to start."""
        if self._extends[_Kind.of(history, observation, tools)]:
            return self.observation_ids(observation, tools)
        return self.extension_ids(history, observation, tools)

    def action_text(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn without the token that ended it: for environments and people only."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A demonstration as ``(ids, action_mask)`` of equal length, laid out like the tokens of a rollout.

        The mask covers what the policy would sample: its words, calls (``tool_calls`` in a message's ``extra``) in the
        model's own format, and the end-of-turn token. The prompt shows the ``tools`` in the first message's ``extra``.
        Messages after the last assistant turn are dropped. Where the template rewrites history, the turns before that
        are context and only those after it are actions. Raises :class:`ValueError` without an assistant turn, or with
        two in a row.
        """
        tools = messages[0].extra.get("tools", ()) if messages else ()
        turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
        if not turns or turns[0] == 0:
            raise ValueError("a demonstration needs messages that end in an assistant turn after a prompt")
        if any(after - before == 1 for before, after in pairwise(turns)):
            raise ValueError("a demonstration has two assistant turns in a row")
        said = [self._spoken(message) for message in messages]
        gaps = [
            self.next_turn_ids(said[: before + 1], messages[before + 1 : after], tools)
            for before, after in pairwise(turns)
        ]
        first = max((place for place, gap in enumerate(gaps, start=1) if gap is None), default=0)
        ids = self.prompt_ids(messages[: turns[first]], tools)
        mask = [False] * len(ids)
        for position in range(first, len(turns)):
            observed = gaps[position - 1] if position > first else None
            action = [*self._encode(said[turns[position]].content), self.end_id]
            ids += [*(observed or ()), *action]
            mask += [False] * len(observed or ()) + [True] * len(action)
        return ids, mask

    def _spoken(self, message: Message) -> Message:
        """The message as a rollout would record it: a turn of the policy as it wrote it."""
        if message.role is not Role.ASSISTANT:
            return message
        return Message(Role.ASSISTANT, self._template.turn_text(message))

    def _probe(self, kind: _Kind) -> bool:
        """Whether turns before such an observation stand as they were, and it looks the same after any of them."""
        observation = [Message(Role.TOOL if kind.only_tools else Role.USER, "ping")]
        opening = [Message(Role.SYSTEM, "Play."), ASKED] if kind.system else [ASKED]
        tools = PROBE_TOOLS if kind.tools else ()
        before = self._template.before(observation)
        for turn in (before, THOUGHT) if before is SAID else (before,):
            histories = (
                [ASKED, turn],
                [*opening, turn],
                [*opening, turn, *observation, turn],
                [*opening, SAID, ASKED, turn],
            )
            try:
                tails = {self._template.tail(history, observation, tools) for history in histories}
            except ConfigError:
                continue  # a role that the template refuses says nothing about history; using it is an error then
            if None in tails or len(tails) > 1:
                return False
        return True

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
