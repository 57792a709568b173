"""One short training run, shared by the tests that look at what it left behind."""

from __future__ import annotations

from typing import Any

import pytest
from short_run import SHORT, Home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def finished(home: Home) -> dict[str, Any]:
    """A completed run: its output and its summary."""
    done = home.sao("train", "tiny", *(part for setting in SHORT for part in ("--set", setting)))
    assert done.returncode == 0, done.stdout + done.stderr
    return {"stdout": done.stdout, **home.json("runs")[0]}
