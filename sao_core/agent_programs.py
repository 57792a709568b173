"""An agent that is a program of its own: what is served to it, how it is started, what it leaves behind.

Protocols and records; infra implements them. A rollout gives a program the address of an OpenAI-compatible
endpoint and a key of its own, answers its calls from the policy, and reads its result when it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from sao_core.tool_calls import ToolCall
from sao_core.trajectory import Message, Role, Sampling

MODEL_NAME = "policy"
"""What the policy is called at the endpoint, whatever its version."""


class CallRefused(Exception):
    """A call that cannot be answered as it was asked; the rollout goes on. ``code`` is OpenAI's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class RolloutOver(Exception):
    """The rollout answers no more calls; the message names the limit, or says that the program has ended."""


class FinishReason(StrEnum):
    """Why a reply ended, as OpenAI names it."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"


@dataclass(frozen=True)
class Completion:
    """The policy's reply to one call: n tokens with their log-probabilities, and what they say."""

    text: str
    """What is outside the tool calls."""
    tool_calls: tuple[ToolCall, ...]
    """Each with its ``call_id``."""
    finish_reason: FinishReason
    prompt_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    """Of the weights that sampled the last token."""

    def as_message(self) -> Message:
        """The reply as a client gets it and sends it back."""
        return Message(
            Role.ASSISTANT, self.text, {"tool_calls": as_tool_calls(self.tool_calls)} if self.tool_calls else {}
        )


def as_tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls as :attr:`sao_core.trajectory.Message.extra` holds them: OpenAI's ``tool_calls``, arguments as objects."""
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in calls
    ]


class ChatAnswerer(Protocol):
    """A rollout as the endpoint sees it."""

    @property
    def sampling(self) -> Sampling:
        """How this rollout samples; a call may ask for nothing else."""
        ...

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        *,
        again: bool = False,
    ) -> Completion:
        """Answer a call; ``again`` marks one that a client repeats because it never read the first answer.

        Raises :class:`CallRefused` or :class:`RolloutOver`.
        """
        ...

    def text_of(self, token_id: int) -> str:
        """The text of one sampled token."""
        ...


@dataclass(frozen=True)
class Address:
    """Where a rollout is served."""

    base_url: str
    """As OpenAI clients take it: it ends in ``/v1``."""
    api_key: str = field(repr=False)
    """The rollout's own."""


class ChatEndpoint(Protocol):
    """Serves rollouts to programs."""

    def serving(self, rollout: ChatAnswerer) -> AbstractAsyncContextManager[Address]:
        """Serve ``rollout`` within the context; later calls with its key are told that it is over."""
        ...


@dataclass(frozen=True)
class ProgramEnded:
    """What is left of a program."""

    exit_code: int | None
    """Negative for a signal, None if it was stopped or could not be started."""
    stdout: str
    """The end of what it printed."""
    stderr: str
    result: str | None = None
    """What it wrote into the file that ``SAO_RESULT`` names."""
    problem: str | None = None
    """Why it could not be started."""

    @property
    def last_words(self) -> str:
        """The last lines that it wrote to standard error, else to standard output; for messages."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return " | ".join(line.strip() for line in lines[-3:])[-500:]


class RunningProgram(Protocol):
    """A program and everything that it started."""

    async def wait(self) -> ProgramEnded:
        """Wait until it ends by itself; whatever it started is gone then as well."""
        ...

    async def stop(self) -> ProgramEnded:
        """Kill it with all that it started."""
        ...


class Programs(Protocol):
    """Starts the user's own programs."""

    def start(
        self, command: Sequence[str], task: Mapping[str, Any], variables: Mapping[str, str]
    ) -> AbstractAsyncContextManager[RunningProgram]:
        """Start ``command`` with ``variables`` in a fresh folder; ``SAO_TASK`` names a file that holds ``task``.

        It is stopped at the end of the context, and when this process dies.
        """
        ...
