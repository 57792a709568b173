"""An MLflow that refuses or is away is told apart in one line: what, where, and what to try."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tracked_run import TrackedRun, empty_home

from infra.settings import Settings
from infra.tracking import TrackingError, send_now


@pytest.fixture
def settings(tmp_path: Path, new_mlflow: Path, migrated_sqlite: Path) -> Settings:
    return empty_home(tmp_path / "home", new_mlflow, migrated_sqlite)


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that has the same answer to everything."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"You are not authenticated.", r"wrong user or password \(401\): set MLFLOW_TRACKING_USERNAME"),
        (403, b"Invalid Host header - possible DNS rebinding attack detected", r"under the name 127.*--allowed-hosts"),
        (403, b'{"error_code": "PERMISSION_DENIED", "message": "Permission denied"}', "this user may not do that"),
        (200, b"<html>hello", "is no MLflow server: check MLFLOW_TRACKING_URI"),
        (None, b"", "nothing listens there"),
    ],
)
def test_what_is_wrong_with_a_server_is_told_apart(
    settings: Settings, status: int | None, body: bytes, said: str
) -> None:
    made = TrackedRun(settings, "tiny-1")
    place = answering(status, body) if status else contextlib.nullcontext("http://127.0.0.1:9")
    with place as url:
        away = Settings.from_environment({"SAO_HOME": str(settings.home), "MLFLOW_TRACKING_URI": url}, settings.home)
        with pytest.raises(TrackingError, match=f"MLflow at {url}: .*{said}") as told:
            send_now(made.ledger, "tiny-1", away, made.config)
    assert len(str(told.value).splitlines()) == 1
