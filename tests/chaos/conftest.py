"""Chaos: how much of it (options), where (places), and the account of it that closes the output.

`pytest tests/chaos` does a little of everything, `make chaos` all of it.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import Result
from rig_plan import Plan
from rig_services import AWS, BUCKET, S3, Postgres
from rig_tally import Tally

TALLY = pytest.StashKey[Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=48, help="kills at named points, on all backends together")
    parser.addoption("--outage", type=float, default=3.0, help="seconds that a store or a database is away")
    parser.addoption("--seed", type=int, default=None, help="of the rigs, as a failure prints it")
    parser.addoption("--tally", type=Path, default=None, help="write the account of kills there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash.setdefault(TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash.get(TALLY, Tally())
    if tally.kills:
        terminalreporter.write_line(str(tally))
    target = config.getoption("tally", None)
    if target is not None:
        target.write_text(json.dumps(vars(tally), indent=1))


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    """The account of this session; add what was killed and what came of it."""
    return request.config.stash.setdefault(TALLY, Tally())


@pytest.fixture(scope="session")
def kills(request: pytest.FixtureRequest) -> int:
    """How many kills each backend is to survive."""
    return request.config.getoption("kills", 48)


@pytest.fixture(scope="session")
def outage_s(request: pytest.FixtureRequest) -> float:
    """How long something is away."""
    return request.config.getoption("outage", 3.0)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """What the rigs of a test draw from; a failure prints it."""
    given = request.config.getoption("seed", None)
    return random.SystemRandom().randrange(10**6) if given is None else given


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    server = S3(tmp_path_factory.mktemp("s3") / "moto.log")
    yield server
    server.close()


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], dict[str, object]]:
    """Backend → the places of a new rig, as arguments of its plan."""

    def of(backend: str) -> dict[str, object]:
        name = f"rig_{secrets.token_hex(4)}"
        folder = tmp_path / name
        if backend == "sqlite+folder":
            return {
                "folder": str(folder),
                "database_url": f"sqlite:///{folder / 'ledger.db'}",
                "object_store": str(folder / "objects"),
            }
        return {
            "folder": str(folder),
            "database_url": request.getfixturevalue("postgres").new_database(name),
            "object_store": f"s3://{BUCKET}/{name}",
            "endpoint_url": request.getfixturevalue("s3").endpoint,
            "environment": AWS,
        }

    return of


@pytest.fixture
def held(tally: Tally) -> Callable[[Plan, Result], None]:
    """Count a rig in, and fail with its seed unless everything held."""

    def check(plan: Plan, result: Result) -> None:
        tally.add(result)
        story = f"seed {plan.seed}, {result.kills.total()} kills, {result.steps} steps; {plan.folder}"
        assert not result.problems, "\n".join([story, *result.problems])
        assert not result.lost, f"{story}: recorded, then lost: {result.lost}"
        assert not result.trained_twice, f"{story}: trained twice: {result.trained_twice}"
        assert result.recorded > 0, story
        assert result.steps > 0, story

    return check
