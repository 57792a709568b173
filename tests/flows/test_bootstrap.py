"""An installation is set up once; the second time finds everything; what is missing is waited for and named."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import httpx
import pytest
from short_run import Home

from flows import bootstrap
from infra.ledger import LedgerError, LedgerRefused


def set_up(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    return home.sao("bootstrap", *arguments)


@pytest.mark.long
def test_a_second_time_changes_nothing(tmp_path: Path, prefect_api: str, s3_endpoint: str) -> None:
    variables = {
        "PREFECT_API_URL": prefect_api,
        "SAO_OBJECT_STORE": "s3://team-bucket/store",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    home = Home(tmp_path, variables)
    first, second = set_up(home), set_up(home)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr + second.stderr
    assert "object store: made the bucket" in first.stdout
    assert httpx.post(f"{prefect_api}/deployments/count", json={}).json() > 5
    assert "made" not in second.stdout.replace("made the bucket", "")
    assert "object store: the bucket is there" in second.stdout
    assert f"ready: start a deployment in Prefect at {prefect_api.removesuffix('/api')}" in second.stdout
    assert "Traceback" not in first.stderr + second.stderr


def test_what_is_missing_at_the_deadline_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    variables = {"PREFECT_API_URL": "http://127.0.0.1:1/api"}
    done = set_up(Home(tmp_path, variables), "--within", "0")
    assert done.returncode == 1
    assert "Prefect at http://127.0.0.1:1/api cannot be reached" in done.stderr
    assert done.stderr.count("\n") == 1
    assert set_up(Home(tmp_path)).returncode == 2


def test_a_reason_is_told_once_and_a_refusal_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "POLL_S", 0.01)
    answers = [LedgerError("starting"), LedgerError("starting"), LedgerError("recovering"), "3 runs"]
    said: list[str] = []

    def look() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    bootstrap.wait("ledger", look, time.monotonic() + 10, said.append)
    assert said == ["ledger: waiting: starting", "ledger: waiting: recovering", "ledger: 3 runs"]

    answers[:] = [LedgerRefused("wrong password"), "3 runs"]
    with pytest.raises(LedgerRefused):
        bootstrap.wait("ledger", look, time.monotonic() + 10, said.append)
    assert answers == ["3 runs"]
