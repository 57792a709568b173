"""Adapters against the real packages, each in a virtual environment of its own: `make test-adapters` makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
VENVS = HERE.parent.parent / ".venv-adapters"


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
