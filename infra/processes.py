"""Children of a flow: start, command, watch, restart within a budget, stop; their exceptions are raised in the parent.

    parent (flow)                                   child (learner, rollout worker, evaluation)
    ChildGroup.command ── {"command": …} ─────────▶ Channel.serve → handler
      waits, watching every child     ◀── report ──
    ChildGroup.close ──── {"stop": …} ────────────▶ Channel.stop is set; after the grace: SIGKILL
    killed ────────────── end of file ────────────▶ rollout: exits at once; learner: Channel.stop, checkpoint, exit

Lines of JSON over a private socket pair carry everything; no pickle, no shared lock that a killed child could hold.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from infra import child as child_side
from infra.child import Channel

__all__ = ["CLOSE_GRACE_S", "Channel", "ChildFailed", "ChildGroup"]

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 24.0
"""Prefect kills a cancelled flow after 30 s; this leaves 6 s to kill and to report."""

_LOG_TAIL_BYTES = 2000
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ChildFailed(RuntimeError):
    """A child raised, died, or ended without being asked to.

    ``summary`` is one line, ``kind`` the full name of the exception's class (empty if the process died without one),
    ``traceback`` the child's, ``exitcode`` None while the process still lives.
    """

    def __init__(self, name: str, summary: str, kind: str = "", traceback: str = "", exitcode: int | None = None):
        super().__init__(f"{name} {summary}" + (f"\n\n{traceback.rstrip()}" if traceback else ""))
        self.name = name
        self.summary = summary
        self.kind = kind
        self.traceback = traceback
        self.exitcode = exitcode


@dataclass(frozen=True)
class _Spec:
    """What it takes to start a child again."""

    name: str
    target: str
    kwargs: Mapping[str, Any]
    environment: Mapping[str, str]
    when_orphaned: Literal["exit", "stop"]
    restarts: int
    restart_window_s: float
    fatal: tuple[str, ...]
    job: bool


@dataclass
class _Child:
    """One process, running or ended; the group's condition guards it."""

    spec: _Spec
    incarnation: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    log_start: int
    progress: dict[str, Any] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    reports: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    finished: bool = False
    stopping: bool = False
    exited: bool = False
    failure: ChildFailed | None = None


class ChildGroup:
    """The children of one flow. Usable from several threads; as a context manager it closes at the end.

    ``log_folder`` takes what each child prints and logs, as ``<name>.log``.
    """

    def __init__(self, log_folder: Path):
        self._log_folder = log_folder
        self._children: dict[str, _Child] = {}
        self._deaths: dict[str, deque[float]] = {}
        self._news = threading.Condition(threading.RLock())
        self._command_ids = itertools.count()
        self._closed = False

    def __enter__(self) -> ChildGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        target: str | Callable[..., Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        when_orphaned: Literal["exit", "stop"] = "exit",
        restarts: int = 0,
        restart_window_s: float = 600.0,
        fatal: tuple[str, ...] = (),
        job: bool = False,
    ) -> None:
        """Start a child that calls ``target(channel, **kwargs)``; returns before it is up.

        ``target``: a module-level function or ``"module:function"``. ``kwargs`` travel as JSON and are rebuilt by the
        target's annotations (pydantic models, dataclasses, paths, enums). ``threads`` limits OpenMP and BLAS before
        torch is imported. ``when_orphaned``: when this process vanishes, exit at once, or stop as if asked to.
        ``restarts``: how many deaths within ``restart_window_s`` are answered by a new start; ``fatal``: exceptions (by
        full name) that no new start mends. Only a ``job`` may end by itself; any other child that does has failed.
        """
        limits = {} if threads is None else dict.fromkeys(_THREAD_LIMITS, str(threads))
        spec = _Spec(
            name=name,
            target=target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}",
            kwargs=dict(kwargs or {}),
            environment={**limits, **(environment or {})},
            when_orphaned=when_orphaned,
            restarts=restarts,
            restart_window_s=restart_window_s,
            fatal=fatal,
            job=job,
        )
        with self._news:
            if self._closed:
                raise RuntimeError(f"{name} cannot start: the group is closed")
            if name in self._children and not self._children[name].exited:
                raise ValueError(f"a child named {name!r} is running already")
            self._deaths[name] = deque()
            self._children[name] = self._launch(spec, incarnation=0)

    def command(
        self,
        name: str,
        verb: str,
        payload: Mapping[str, Any] | None = None,
        *,
        alongside: Callable[[], object] | None = None,
        on_wait: Callable[[], None] | None = None,
        poll_s: float = 0.2,
    ) -> Any:
        """Have a child do something and return its report, watching all children meanwhile.

        ``alongside`` is called once, when the command is on its way: work of the parent that need not delay the child.
        ``on_wait`` is called every ``poll_s`` or sooner; what it raises ends the wait, while the child goes on and its
        late report is dropped. Raises :class:`ChildFailed` as soon as any child has failed beyond its restarts.
        """
        with self._news:
            self._supervise()
            child = self._children[name]
            number = next(self._command_ids)
            child.awaited.add(number)
            self._send(child, {"command": verb, "id": number, "payload": dict(payload or {})})

        def reported() -> bool:
            if number in child.reports:
                return True
            if child.exited:
                why = child.failure.summary if child.failure else "has ended"
                raise ChildFailed(name, f"{why} (in the middle of {verb!r})", *_details(child))
            return False

        try:
            if alongside is not None:
                alongside()
            self._wait(reported, on_wait, poll_s)
            return child.reports[number]
        finally:
            with self._news:
                child.awaited.discard(number)
                child.reports.pop(number, None)

    def join(self, name: str, *, on_wait: Callable[[], None] | None = None, poll_s: float = 0.2) -> Any:
        """Wait for the end of a job, or of a child told to stop, and return what its target returned.

        ``on_wait`` and what is raised as in :meth:`command`.
        """
        self._wait(lambda: self._children[name].exited, on_wait, poll_s)
        with self._news:
            child = self._children[name]
            if child.failure:
                raise child.failure
            return child.result

    def watch(self, timeout_s: float = 0.0) -> None:
        """Restart who died within budget, raise the first :class:`ChildFailed` otherwise; waits so long for news."""
        with self._news:
            self._supervise()
            if timeout_s > 0:
                self._news.wait(timeout_s)
                self._supervise()

    def progress(self, name: str) -> dict[str, Any]:
        """What the child last said of its progress."""
        with self._news:
            return dict(self._children[name].progress)

    def alive(self) -> dict[str, int]:
        """Process ids of the children that run, by name."""
        with self._news:
            return {name: child.process.pid for name, child in self._children.items() if not child.exited}

    def restarted(self, name: str) -> int:
        """How often a child was restarted."""
        with self._news:
            return self._children[name].incarnation

    def stop(self, name: str) -> None:
        """Ask one child to end; does not wait."""
        with self._news:
            self._ask_to_stop(self._children[name])

    def close(self, grace_s: float = CLOSE_GRACE_S) -> list[str]:
        """Ask all children to end, kill who is left after ``grace_s``, and return the names of those.

        A child's error is logged, not raised; :meth:`join` still raises it, or returns what its target returned. An
        interrupt while waiting (a second Ctrl-C) kills at once.
        """
        deadline = time.monotonic() + grace_s
        with self._news:
            self._closed = True
            running = [child for child in self._children.values() if not child.exited]

            def gone() -> bool:
                return all(child.exited for child in running)

            killed: list[str] = []
            try:
                for child in running:
                    self._ask_to_stop(child)
                self._news.wait_for(gone, max(0.0, deadline - time.monotonic()))
            finally:
                for child in running:
                    if not child.exited:
                        logger.warning("%s did not leave in time and was killed", child.spec.name)
                        killed.append(child.spec.name)
                        child.process.kill()
                self._news.wait_for(gone, 5.0)
            for child in running:
                if child.failure and child.spec.name not in killed:
                    logger.error("while stopping: %s", child.failure)
            return killed

    def _launch(self, spec: _Spec, incarnation: int) -> _Child:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        start = {
            "sys_path": sys.path,
            "target": spec.target,
            "kwargs": spec.kwargs,
            "incarnation": incarnation,
            "exit_when_orphaned": spec.when_orphaned == "exit",
        }
        first_line = child_side.encode(start)
        ours, theirs = socket.socketpair()
        with theirs, open(self._log_folder / f"{spec.name}.log", "ab") as log, _signals_blocked():
            log_start = log.tell()
            process = subprocess.Popen(
                # -P: the folder of the script is no place to import from.
                [sys.executable, "-u", "-P", child_side.__file__, spec.name, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.environment},
            )
        child = _Child(spec, incarnation, process, ours, log_start)
        reader = threading.Thread(target=self._read, args=(child,), name=f"{spec.name}-reader", daemon=True)
        reader.start()
        threading.Thread(target=self._reap, args=(child, reader), name=f"{spec.name}-reaper", daemon=True).start()
        with suppress(OSError):  # dead already: the reaper sees to that
            ours.sendall(first_line)
        return child

    def _send(self, child: _Child, message: Mapping[str, Any]) -> None:
        # Small enough for one write: a signal handler that raises in this thread leaves no half line behind.
        data = child_side.encode(message)
        with suppress(OSError):  # dead already: the reaper sees to that
            child.connection.sendall(data)

    def _ask_to_stop(self, child: _Child) -> None:
        if not child.stopping:
            child.stopping = True
            self._send(child, {"stop": True})

    def _wait(self, done: Callable[[], bool], on_wait: Callable[[], None] | None, poll_s: float) -> None:
        while True:
            with self._news:
                self._supervise()
                if not done():
                    self._news.wait(poll_s)
                    self._supervise()
                if done():
                    return
            if on_wait:
                on_wait()

    def _supervise(self) -> None:
        """Raise the first failure, or restart the child where its budget allows."""
        if self._closed:
            return
        for name, child in list(self._children.items()):
            if child.failure is None:
                continue
            now = time.monotonic()
            deaths = self._deaths[name]
            while deaths and now - deaths[0] > child.spec.restart_window_s:
                deaths.popleft()
            if len(deaths) >= child.spec.restarts or child.failure.kind in child.spec.fatal:
                raise child.failure
            if not child.exited:
                continue  # it has raised and is on its way out
            deaths.append(now)
            logger.warning("restart %d of %d: %s", len(deaths), child.spec.restarts, child.failure)
            self._children[name] = self._launch(child.spec, child.incarnation + 1)

    def _read(self, child: _Child) -> None:
        for message in child_side.messages(child.connection):
            with self._news:
                if "progress" in message:
                    child.progress.update(message["progress"])
                elif "report" in message:
                    if message["report"] in child.awaited:
                        child.reports[message["report"]] = message["value"]
                elif "error" in message:
                    error = message["error"]
                    child.failure = ChildFailed(
                        child.spec.name, f"failed: {error['summary']}", error["kind"], error["traceback"]
                    )
                else:
                    child.finished = True
                    child.result = message["result"]
                self._news.notify_all()

    def _reap(self, child: _Child, reader: threading.Thread) -> None:
        code = child.process.wait()
        reader.join(1.0)  # its last words
        with suppress(OSError):
            child.connection.shutdown(socket.SHUT_RDWR)  # ends the reader even if a grandchild holds the other end
        with self._news:
            child.exited = True
            child.connection.close()
            if child.failure is not None:
                child.failure.exitcode = code
            elif not child.finished:
                child.failure = ChildFailed(child.spec.name, self._how_it_died(child, code), exitcode=code)
            elif not (child.stopping or child.spec.job):
                child.failure = ChildFailed(child.spec.name, "ended although nobody asked it to", exitcode=code)
            self._news.notify_all()

    def _how_it_died(self, child: _Child, code: int) -> str:
        how = f"died with exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (the machine may be out of memory)"
        path = self._log_folder / f"{child.spec.name}.log"
        with open(path, "rb") as log:
            log.seek(max(child.log_start, path.stat().st_size - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        return how + (f"; the end of {path}:\n{tail}" if tail else f"; {path} has nothing to say")


def _details(child: _Child) -> tuple[str, str, int | None]:
    failure = child.failure
    return (failure.kind, failure.traceback, failure.exitcode) if failure else ("", "", child.process.returncode)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started inside inherits the block, so no signal finds it before it ignores them; ours stay pending."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, child_side.IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
