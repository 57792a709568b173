"""A server that speaks OpenAI's chat completions, for tests of what asks a chat model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""The text of a reply; or a status, a body (a mapping is sent as JSON) and perhaps headers."""


@dataclass
class ChatServer:
    """What it heard, and what it will answer: the next of ``answers``, its last one for ever, or by a function."""

    base_url: str = ""
    answers: list[Answer] | Callable[[Mapping[str, Any]], Answer] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def next(self, body: Mapping[str, Any]) -> Answer:
        if callable(self.answers):
            return self.answers(body)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def serving(answers: list[Answer] | Callable[[Mapping[str, Any]], Answer]) -> Iterator[ChatServer]:
    """Serve on a free port of this machine for as long as the block runs."""
    state = ChatServer(answers=answers)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                state.bodies.append(body)
                state.paths.append(self.path)
                state.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = state.next(body)
            status, sent, *more = (200, completion(answer)) if isinstance(answer, str) else answer
            data = sent.encode() if isinstance(sent, str) else json.dumps(sent).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(text: str | None) -> dict[str, Any]:
    return {"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
