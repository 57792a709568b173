"""Adapters against the real packages, each in a virtual environment of its own: `make test-adapters` makes them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
VENVS = HERE.parent.parent / ".venv-adapters"
sys.path.append(str(HERE.parent))  # short_run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--adapters", type=Path, default=VENVS, help="folder with a virtual environment per package")


def _python(config: pytest.Config, package: str) -> str:
    python = config.getoption("--adapters") / package / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{package} has no virtual environment at {python.parent.parent}: run make test-adapters")
    return str(python)


@pytest.fixture(scope="session")
def verifiers_python(request: pytest.FixtureRequest) -> str:
    return _python(request.config, "verifiers")


@pytest.fixture(scope="session")
def openenv_python(request: pytest.FixtureRequest) -> str:
    return _python(request.config, "openenv")


@pytest.fixture(scope="session")
def openenv_url(openenv_python: str) -> Iterator[str]:
    """A guessing game behind a server that is written with OpenEnv's own library."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([openenv_python, str(HERE / "guessing_server.py"), str(port)])
    try:
        for _ in range(600):
            assert server.poll() is None, "the server ended"
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
