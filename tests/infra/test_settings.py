"""Settings: the only reader of environment variables."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from infra.settings import Settings, SettingsError


def test_without_variables_everything_lies_in_one_folder(tmp_path: Path) -> None:
    settings = Settings.from_environment({}, directory=tmp_path)
    home = tmp_path / ".sao"
    assert settings.home == home
    assert settings.database_url == f"sqlite:///{home}/ledger.db"
    assert settings.object_store == str(home / "objects")
    assert settings.tracking_uri == f"sqlite:///{home}/mlflow.db"
    assert settings.prefect_api_url is None
    assert settings.logs("run-1") == home / "logs" / "run-1"
    assert not home.exists()


def test_variables_move_the_parts(tmp_path: Path) -> None:
    settings = Settings.from_environment(
        {
            "SAO_HOME": "state",
            "SAO_DATABASE_URL": "postgresql://sao@db/sao",
            "SAO_OBJECT_STORE": "s3://bucket/prefix/",
            "MLFLOW_TRACKING_URI": "http://mlflow:5000",
            "PREFECT_API_URL": "http://prefect:4200/api",
            "AWS_ENDPOINT_URL": "http://s3:9000",
        },
        directory=tmp_path,
    )
    assert settings.home == tmp_path / "state"
    assert settings.database_url == "postgresql://sao@db/sao"
    assert settings.object_store == "s3://bucket/prefix"
    assert settings.tracking_uri == "http://mlflow:5000"
    assert settings.prefect_api_url == "http://prefect:4200/api"
    assert settings.s3_endpoint_url == "http://s3:9000"


def test_settings_travel_to_children_unchanged(tmp_path: Path) -> None:
    settings = Settings.from_environment({}, directory=tmp_path)
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SAO_DATABASE_URL", "mysql://db/sao"), ("SAO_OBJECT_STORE", "gs://bucket"), ("SAO_OBJECT_STORE", "s3://")],
)
def test_a_place_that_cannot_be_used_is_refused_by_name(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        Settings.from_environment({variable: value}, directory=tmp_path)
