"""A child's side of :mod:`infra.processes`: the interpreter's start, the channel to the parent, the end.

This file is the script that a child runs. It imports nothing heavy and never the parent's ``__main__``; the target
module is imported once the environment stands. SIGTERM and SIGINT are ignored: they reach the whole process group,
and the parent alone decides.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

logger = logging.getLogger("infra.child")

ORPHAN_GRACE_S = 300.0
"""Longest that a child whose parent vanished may take for its checkpoint."""

IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Channel:
    """The child's line to its parent; handed to the target as first argument."""

    def __init__(self, name: str, incarnation: int, connection: socket.socket, exit_when_orphaned: bool):
        self.name = name
        self.incarnation = incarnation
        """0 at first, one more after each restart; a leaseholder's name needs it, or it renews leases of the dead."""
        self.stop = threading.Event()
        """Set when the parent asks for the end, or has vanished."""
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._exit_when_orphaned = exit_when_orphaned

    def progress(self, **values: Any) -> None:
        """Show the parent where the child is; later values replace earlier ones of the same name."""
        self.send({"progress": values})

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Answer commands, one at a time, until told to stop; a command under way is finished first.

        A handler gets the payload as keyword arguments and returns what JSON can say. What it raises ends the child
        and is raised in the parent.
        """
        while not self.stop.is_set():
            message = self._commands.get()
            if message is None:
                continue
            verb = message["command"]
            if verb not in handlers:
                raise ValueError(f"{self.name} has no command {verb!r}; there are: {', '.join(sorted(handlers))}")
            self.send({"report": message["id"], "value": handlers[verb](**message["payload"])})

    def listen(self, messages: Iterator[dict[str, Any]]) -> None:
        """Take the parent's messages until it vanishes, then end the process, at once or after the target's own end."""
        for message in messages:
            if "command" in message:
                self._commands.put(message)
            else:
                self._stop()
        if self._exit_when_orphaned:
            logger.error("%s: the parent process has vanished; leaving", self.name)
            os._exit(1)
        logger.error("%s: the parent process has vanished; stopping", self.name)
        self._stop()
        time.sleep(ORPHAN_GRACE_S)
        logger.error("%s: not done %g s after the parent vanished; leaving", self.name, ORPHAN_GRACE_S)
        os._exit(1)

    def send(self, message: Mapping[str, Any]) -> None:
        """One message to the parent; dropped if it has vanished, which :meth:`listen` sees to."""
        data = encode(message)
        with self._sending, suppress(OSError):
            self._connection.sendall(data)

    def _stop(self) -> None:
        self.stop.set()
        self._commands.put(None)


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as one line of JSON. Raises on what JSON cannot say, such as an array."""
    return json.dumps(message, default=_jsonable).encode() + b"\n"


def messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The other side's messages until it is gone."""
    with suppress(OSError), connection.makefile("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield json.loads(line)


def run(channel: Channel, start: Mapping[str, Any]) -> typing.NoReturn:
    """Call the target, report what it returned or its traceback, end the process.

    Nothing outlives the target: neither a thread nor an exit hook of some library can hold the process.
    """
    try:
        module, _, function = start["target"].partition(":")
        target = getattr(importlib.import_module(module), function)
        channel.send({"result": target(channel, **_typed(target, start["kwargs"]))})
        code = 0
    except BaseException as error:
        text = traceback.format_exc()
        logger.error("%s", text)
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        summary = traceback.format_exception_only(error)[-1].strip()
        channel.send({"error": {"summary": summary, "kind": kind, "traceback": text}})
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _typed(target: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values → what the target's annotations say; an argument without annotation stays as it is."""
    inspect.signature(target).bind(None, **kwargs)
    if not kwargs:
        return {}
    from pydantic import TypeAdapter

    hints = typing.get_type_hints(target)
    return {
        key: TypeAdapter(hints[key]).validate_python(value) if key in hints else value for key, value in kwargs.items()
    }


def _jsonable(value: Any) -> Any:
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)


def _main(name: str, descriptor: int) -> None:
    # The parent blocked both signals around our start, so that none could find us before this.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    faulthandler.enable()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    incoming = messages(connection)
    start = next(incoming, None)
    if start is None:
        return
    sys.path[:] = start["sys_path"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from infra import child  # this file under its real name, so that there is one class Channel
    from infra.allocator import keep_lean

    keep_lean()
    channel = child.Channel(name, start["incarnation"], connection, start["exit_when_orphaned"])
    threading.Thread(target=channel.listen, args=(incoming,), name="parent", daemon=True).start()
    child.run(channel, start)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
