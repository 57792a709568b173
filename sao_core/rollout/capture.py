"""Answers the chat completions of a program from the policy, and records every token that was sampled for them.

    messages extend a conversation of this rollout ──▶ only what is new is rendered; its segment goes on
    anything else (edited, a second agent, a retry) ──▶ the whole prompt is rendered; a new segment begins

What the policy said is never encoded again: it stands in its segment as sampled, and is context in every later one.
The session holds the tokens of one conversation at a time; at a change it is restarted with those of the other. Calls
take turns. Nothing here knows HTTP, programs or rewards.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from sao_core.agent_programs import CallRefused, Completion, FinishReason, RolloutOver
from sao_core.config import ConfigError, RolloutConfig
from sao_core.rollout.engine import Sampled, Session, StopReason
from sao_core.rollout.recorder import Recorder
from sao_core.rollout.renderer import Renderer
from sao_core.tool_calls import MalformedToolCall, ToolCall, Tools, parse_tool_calls
from sao_core.trajectory import Message, Role, Sampling

T = TypeVar("T")

CONTEXT = "max_context_tokens"
"""The one limit after which a program may still go on: with a shorter conversation."""

_CUT_BY = {
    StopReason.MAX_NEW_TOKENS: "max_action_tokens",
    StopReason.CONTEXT_FULL: CONTEXT,
    StopReason.DEADLINE: "rollout_timeout",
}


@dataclass(eq=False)
class _Conversation:
    """One token sequence as the program sees it."""

    segment: int
    tools: Tools
    messages: list[Message]
    """What was asked and answered, as the program wrote and read it."""
    answer: Completion
    length: int
    """Tokens so far."""
    closed: bool
    """The policy ended its last turn itself."""


class CapturedRollout:
    """One rollout that a program drives: see :class:`sao_core.agent_programs.ChatAnswerer`.

    ``deadline`` is a time of :func:`time.monotonic`. The caller owns ``session`` and closes it after :meth:`close`.
    """

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        limits: RolloutConfig,
        recorder: Recorder,
        sampling: Sampling,
        deadline: float,
    ) -> None:
        self._session, self._renderer, self._limits, self._recorder = session, renderer, limits, recorder
        self._sampling, self._deadline = sampling, deadline
        self._conversations: list[_Conversation] = []
        self._current: _Conversation | None = None
        self._spoken: defaultdict[str, list[tuple[Message, Message]]] = defaultdict(list)
        self._turn = asyncio.Lock()
        self._work: asyncio.Task[Sampled] | None = None
        self._closed = False
        self._waiting = 0
        self._calls = 0
        self._quiet_since = time.monotonic()
        self.limit: str | None = None
        """The setting of `rollout` that cut the last call."""
        self.failure: Exception | None = None
        """What the engine failed with; no fault of this rollout."""
        self.generation_s = 0.0

    @property
    def sampling(self) -> Sampling:
        """How this rollout samples."""
        return self._sampling

    @property
    def quiet_since(self) -> float | None:
        """When the last call was answered; None while one waits."""
        return None if self._waiting else self._quiet_since

    async def complete(
        self, messages: Sequence[Message], tools: Tools = (), max_tokens: int | None = None, *, again: bool = False
    ) -> Completion:
        """Answer a call; see :class:`sao_core.agent_programs.ChatAnswerer`."""
        if not messages:
            raise CallRefused("messages must not be empty", "invalid_value")
        self._waiting += 1
        try:
            async with self._turn:
                answered = self._answer_to(messages, tools) if again else None
                return answered or await self._answer(list(messages), tools, max_tokens)
        finally:
            self._waiting -= 1
            self._quiet_since = time.monotonic()

    def text_of(self, token_id: int) -> str:
        """The text of one sampled token; empty for one that ends a turn."""
        return self._renderer.action_text([token_id])

    def close(self) -> None:
        """Answer nothing more; a call under way is told so, and leaves no trace."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()

    async def _answer(self, messages: list[Message], tools: Tools, max_tokens: int | None) -> Completion:
        left = self._tokens_left()
        known, common = self._find(messages, tools)
        ids = None if known is None else self._extension(known, messages)
        if ids is None:
            known = None
            ids = self._render(lambda: self._renderer.prompt_ids(self._as_spoken(messages), tools))
        sampled = await self._sample(known, ids, min(left, max_tokens or left))
        self._record(known, messages[-1].role, ids, sampled)
        self._calls += 1
        closed = sampled.stop_reason is StopReason.STOP_TOKEN
        as_asked = sampled.stop_reason is StopReason.MAX_NEW_TOKENS and len(sampled.token_ids) == max_tokens
        self.limit = None if closed or as_asked else _CUT_BY[sampled.stop_reason]
        text = self._renderer.action_text(sampled.token_ids.tolist())
        prompt_tokens = len(ids) + (known.length if known else 0)
        completion = self._completion(text, closed, tools, sampled, prompt_tokens)
        reply, raw = completion.as_message(), Message(Role.ASSISTANT, text)
        self._spoken[reply.content.strip()].append((reply, raw))
        self._recorder.messages += [*self._as_spoken(messages[common:]), raw]
        if known is not None:
            self._conversations.remove(known)
        length = prompt_tokens + len(sampled.token_ids)
        self._current = _Conversation(
            self._recorder.segment, tools, [*messages, reply], completion, length=length, closed=closed
        )
        self._conversations.append(self._current)
        return completion

    def _tokens_left(self) -> int:
        """Tokens that this rollout may still sample; raises RolloutOver if it may not."""
        limits = self._limits
        if self._closed:
            raise RolloutOver("this rollout has ended")
        if self._calls >= limits.max_turns:
            self._end("max_turns", limits.max_turns)
        left = limits.max_action_tokens - self._recorder.num_action_tokens
        if left < 1:
            self._end("max_action_tokens", limits.max_action_tokens)
        if time.monotonic() >= self._deadline:
            self._end("rollout_timeout", limits.rollout_timeout_s, "_s")
        return left

    def _end(self, limit: str, value: float, unit: str = "") -> NoReturn:
        self.limit = limit
        raise RolloutOver(f"this rollout is over: rollout.{limit}{unit}={value:g} is reached")

    def _find(self, messages: Sequence[Message], tools: Tools) -> tuple[_Conversation | None, int]:
        """The longest conversation that ``messages`` go on from, and how many of them any conversation begins with."""
        found: _Conversation | None = None
        shared = 0
        for conversation in self._conversations:
            history = conversation.messages
            common = _common(history, messages)
            shared = max(shared, common)
            extends = common == len(history) < len(messages) and list(conversation.tools) == list(tools)
            if extends and (found is None or len(history) > len(found.messages)):
                found = conversation
        return found, shared

    def _answer_to(self, messages: Sequence[Message], tools: Tools) -> Completion | None:
        """What was answered to the same call before, the latest if several."""
        for conversation in reversed(self._conversations):
            asked = conversation.messages[:-1]
            same = len(asked) == len(messages) == _common(asked, messages)
            if same and list(conversation.tools) == list(tools):
                return conversation.answer
        return None

    def _extension(self, known: _Conversation, messages: list[Message]) -> list[int] | None:
        """Ids to append to a conversation's tokens; None if the template would change what stands there."""
        count = len(known.messages)
        history = self._as_spoken(known.messages)
        ids = self._render(lambda: self._renderer.next_turn_ids(history, messages[count:], known.tools))
        return ids if ids is None or known.closed else [self._renderer.end_id, *ids]

    def _as_spoken(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, those of the policy with the words that it sampled."""
        return [self._raw(message) if message.role is Role.ASSISTANT else message for message in messages]

    def _raw(self, message: Message) -> Message:
        spoken = self._spoken.get(message.content.strip(), ())
        return next((raw for told, raw in reversed(spoken) if same(told, message)), message)

    def _render(self, render: Callable[[], T]) -> T:
        """What the template refuses is for the program to know."""
        try:
            return render()
        except (ConfigError, MalformedToolCall) as error:
            raise CallRefused(str(error), "invalid_value") from error

    async def _sample(self, known: _Conversation | None, ids: list[int], max_new_tokens: int) -> Sampled:
        """Sample a turn after ``ids``, which ``known`` goes on with. Raises CallRefused where they do not fit."""
        session, current = self._session, self._current
        self._current = None
        if known is None or known is not current:
            session.restart()
            if known is not None:
                self._recorder.return_to(known.segment)
                ids = self._recorder.context + ids
        if len(ids) >= session.room:
            if known is current:
                self._current = current
            self.limit = CONTEXT
            raise CallRefused(
                f"{len(ids)} more tokens of the conversation leave no room for a reply: {session.room} of "
                f"rollout.max_context_tokens={self._limits.max_context_tokens} are free",
                "context_length_exceeded",
            )
        started = time.monotonic()
        self._work = asyncio.ensure_future(
            session.extend_and_sample(ids, self._renderer.stop_ids, max_new_tokens, self._deadline)
        )
        try:
            return await self._work
        except asyncio.CancelledError:
            if self._closed:
                raise RolloutOver("this rollout has ended") from None
            raise
        except Exception as error:
            self.failure, self._closed = error, True
            raise
        finally:
            self._work = None
            self.generation_s += time.monotonic() - started

    def _record(self, known: _Conversation | None, role: Role, ids: list[int], sampled: Sampled) -> None:
        if known is None:
            self._recorder.start_segment(role, ids)
        else:
            self._recorder.observe(role, ids)
        self._recorder.act(sampled)

    def _completion(self, text: str, closed: bool, tools: Tools, sampled: Sampled, prompt_tokens: int) -> Completion:
        told, calls = self._read(text, tools) if closed else (text, ())
        reason = FinishReason.LENGTH if not closed else FinishReason.TOOL_CALLS if calls else FinishReason.STOP
        return Completion(
            text=told,
            tool_calls=calls,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            token_ids=tuple(sampled.token_ids.tolist()),
            logprobs=tuple(sampled.logprobs.tolist()),
            version=int(sampled.versions[-1]) if len(sampled.versions) else -1,
        )

    def _read(self, text: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        """What the program sees of a turn: calls where they can be read, else the text as it is."""
        if not tools:
            return text, ()
        try:
            outside, calls = parse_tool_calls(text, tools)
        except MalformedToolCall:
            return text, ()
        return outside, tuple(replace(call, call_id=self._call_id(call, number)) for number, call in enumerate(calls))

    def _call_id(self, call: ToolCall, number: int) -> str:
        """Mistral's templates want ids of nine letters and digits; those of others are never shown."""
        given = call.call_id
        return given if len(given) == 9 and given.isalnum() else f"c{self._calls % 100000:05d}{number % 1000:03d}"


def same(one: Message, other: Message) -> bool:
    """Whether two messages say the same; in a turn of the policy, ids of calls and white space around it may differ."""
    if one.role is not other.role:
        return False
    if one.role is not Role.ASSISTANT:
        return one.content == other.content and dict(one.extra) == dict(other.extra)
    return one.content.strip() == other.content.strip() and _functions(one) == _functions(other)


def _functions(message: Message) -> list[Mapping[str, Any]]:
    return [call["function"] for call in message.extra.get("tool_calls") or ()]


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if not same(mine, theirs):
            break
        count += 1
    return count
