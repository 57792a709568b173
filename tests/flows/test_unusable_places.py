"""A database, store or server that cannot be used is one line for a person: what, where, what to try; exit code 1."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from outages import free_port

from flows import cli

SECRET = "s3cret-s3cret"
AWAY = f"127.0.0.1:{free_port()}"
DATABASE = {"SAO_DATABASE_URL": f"postgresql://u:{SECRET}@{AWAY}/x"}
STORE = {
    "SAO_OBJECT_STORE": "s3://b/p",
    "AWS_ENDPOINT_URL": f"http://{AWAY}",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
}
PREFECT = {"PREFECT_API_URL": f"http://{AWAY}/api", "PREFECT_API_AUTH_STRING": f"admin:{SECRET}"}

UNUSABLE = {
    "a database, for a listing": (DATABASE, ["runs"], "u:***@{away}/x could not be reached for 5 s"),
    "a database, for a training": (DATABASE, ["train"], "is the database running, and its address in SAO_DATABASE_URL"),
    "a store, for upkeep": (STORE, ["upkeep"], "the object store s3://b/p at http://{away} cannot be used"),
    "a store, for a training": (STORE, ["train"], "is it running, and is AWS_ENDPOINT_URL right?"),
    "Prefect, for a training": (PREFECT, ["train"], "Prefect at http://{away}/api cannot be reached"),
}
Sao = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sao:
    """Run the command in this process, with some variables; returns exit code, output and errors."""

    def run(variables: Mapping[str, str], *arguments: str) -> tuple[int, str, str]:
        for name in [name for name in os.environ if name.startswith(("SAO_", "PREFECT_", "MLFLOW_", "AWS_"))]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["sao", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_place_that_is_away_is_one_line_within_seconds(case: str, sao: Sao, tmp_path: Path) -> None:
    variables, command, said = UNUSABLE[case]
    began = time.monotonic()
    code, out, err = sao(variables, *command)
    assert code == 1, out + err
    assert said.format(away=AWAY) in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert SECRET not in out + err
    assert time.monotonic() - began < 40
    assert not (tmp_path / ".sao" / "prefect").exists()


def test_a_dry_run_shows_no_password(sao: Sao) -> None:
    variables = {"MLFLOW_TRACKING_URI": f"http://u:{SECRET}@{AWAY}", "PREFECT_API_URL": f"http://u:{SECRET}@{AWAY}/api"}
    code, out, err = sao(variables, "train", "--dry-run")
    assert code == 0, err
    assert f"http://{AWAY}/api" in out
    assert SECRET not in out + err


def test_doctor_looks_at_what_it_is_asked_for(sao: Sao) -> None:
    code, out, _ = sao(PREFECT, "doctor", "--only", "ledger,object-store")
    assert code == 0, out
    assert [line.partition(":")[0] for line in out.splitlines()] == ["ok  ledger", "ok  object store"]
    code, out, _ = sao(PREFECT, "doctor", "--only", "prefect")
    assert code == 1
    assert f"no  Prefect: Prefect at http://{AWAY}/api cannot be reached" in out.replace("\n", " ")
    code, _, err = sao({}, "doctor", "--only", "ledgr")
    assert code == 2
    assert "there is no check ledgr; there are: python" in err
