"""What the machine lends an environment: a place to run code that nobody trusts, and chat models to ask.

Protocols and records only; infra implements them, tests use small ones. What is not lent raises :class:`NotLent`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from sao_core.agent_programs import ChatEndpoint, Programs
from sao_core.trajectory import Message


class NotLent(RuntimeError):
    """The machine does not offer what the environment needs; the message says how it would."""


class StoppedBy(StrEnum):
    """The limit that ended a program."""

    WALL = "wall"
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    SANDBOX = "sandbox"
    """The sandbox itself broke: no fault of the program."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. Whatever goes over is killed with all its descendants."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * 2**20
    processes: int = 64
    output_bytes: int = 64 * 2**10
    """Of standard output and of standard error, each; what is more is cut and the program stopped."""
    file_bytes: int = 16 * 2**20
    """Everything that it may keep on its private disk."""


@dataclass(frozen=True)
class Ran:
    """What came of a program, as data: a program that fails is no error of ours."""

    exit_code: int | None
    """None if a limit or a signal ended it."""
    stdout: str
    stderr: str
    wall_s: float
    stopped_by: StoppedBy | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Those asked for that exist and are regular files within the limits, by name."""


class CodeSession(Protocol):
    """A Python that keeps its variables between two pieces of code."""

    async def run(self, code: str, wall_s: float | None = None) -> Ran:
        """Run ``code`` like a notebook cell: what it prints, the last expression's value, or the traceback.

        ``exit_code`` is 0, 1 after an exception, None once the session is over: a limit ended it, and every later
        call answers the same at once.
        """
        ...

    async def close(self) -> None:
        """Kill it and all that it started; closing twice is harmless."""
        ...


class CodeRunner(Protocol):
    """Runs code that a model wrote: no network, nothing of the host to read or write, limits on everything."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
        collect: Sequence[str] = (),
    ) -> Ran:
        """Run ``argv`` (``python`` is this interpreter) in a fresh folder that holds ``files`` by relative path.

        ``collect`` names files to bring back. Raises ValueError for a path that leaves the folder.
        """
        ...

    async def open(self, limits: Limits | None = None) -> CodeSession:
        """A fresh Python session."""
        ...


class ChatModel(Protocol):
    """A model behind an OpenAI-compatible endpoint, e.g. a judge."""

    async def complete(self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 0.0) -> str:
        """The text of its reply. Raises an error that says what the endpoint answered."""
        ...


class ChatModels(Protocol):
    """Opens chat models by address; it knows the keys, environments do not."""

    def at(self, base_url: str, model: str, *, timeout_s: float = 60.0) -> ChatModel:
        """The model called ``model`` at ``base_url`` (as OpenAI clients take it: it ends in ``/v1``)."""
        ...


@dataclass(frozen=True)
class Outside:
    """What is lent; an environment that needs more than there is says so before it starts."""

    code_runner: CodeRunner | None = None
    chat_models: ChatModels | None = None
    chat_endpoint: ChatEndpoint | None = None
    program_starter: Programs | None = None

    @property
    def code(self) -> CodeRunner:
        """The place to run untrusted code; raises :class:`NotLent` without one."""
        if self.code_runner is None:
            raise NotLent("this environment runs code that a model wrote, and there is no sandbox here: see sao doctor")
        return self.code_runner

    @property
    def chat(self) -> ChatModels:
        """Chat models by address; raises :class:`NotLent` without them."""
        if self.chat_models is None:
            raise NotLent("this environment asks another model, and this process may not")
        return self.chat_models

    @property
    def endpoint(self) -> ChatEndpoint:
        """Where programs ask the policy; raises :class:`NotLent` without one."""
        if self.chat_endpoint is None:
            raise NotLent("this environment serves the policy to a program, and this process has no endpoint")
        return self.chat_endpoint

    @property
    def programs(self) -> Programs:
        """Who starts the user's programs; raises :class:`NotLent` without one."""
        if self.program_starter is None:
            raise NotLent("this environment starts a program of its own, and this process may not")
        return self.program_starter
