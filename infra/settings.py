"""Where things are: the only reader of environment variables in this project.

`Settings` is frozen and picklable: a flow reads it once and hands it to its children. It holds places, never
choices of training (those are `sao_core.config`). Nothing here opens or creates what it names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

SANDBOXES = ("auto", "bubblewrap", "namespaces", "none")


class SettingsError(ValueError):
    """An environment variable that cannot be used; the message names it, its value and the way out."""


@dataclass(frozen=True)
class Settings:
    """The places of one installation; every path is absolute, so that children may run anywhere."""

    home: Path
    """`SAO_HOME`, default `.sao` in the working directory: all state of one machine."""
    database_url: str
    """`SAO_DATABASE_URL`, default SQLite in `home`: `sqlite:///…` or `postgresql://…`, as SQLAlchemy reads it."""
    object_store: str
    """`SAO_OBJECT_STORE`, default a folder in `home`: an absolute path or `s3://bucket/prefix`."""
    tracking_uri: str
    """`MLFLOW_TRACKING_URI`, default SQLite in `home`."""
    prefect_api_url: str | None = None
    """`PREFECT_API_URL`; None: a local server is started for the lifetime of a command."""
    s3_endpoint_url: str | None = None
    """`AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`; credentials and region stay with the usual AWS variables."""
    prefect_pages: str | None = None
    """`SAO_PREFECT_PAGES`: where browsers see Prefect, if that is not where `PREFECT_API_URL` is (containers)."""
    mlflow_pages: str | None = None
    """`SAO_MLFLOW_PAGES`: where browsers see MLflow, if that is not where `MLFLOW_TRACKING_URI` is."""
    prefect_port: int = 4200
    """`SAO_PREFECT_PORT`: where `sao up` serves Prefect."""
    mlflow_port: int = 5000
    """`SAO_MLFLOW_PORT`: where `sao up` serves MLflow."""
    sandbox: str = "auto"
    """`SAO_SANDBOX`: how code that a model wrote is kept apart: `auto` takes `bubblewrap` if it is installed, else
    `namespaces`; where neither works such code is not run. `none` runs it as this user, with network and files."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, directory: Path | None = None) -> Settings:
        """Read the variables (default: this process's) with relative paths taken from ``directory`` (default: cwd).

        Raises:
            SettingsError: a URL with a scheme that no part of this project can use.
        """
        env = os.environ if environ is None else environ
        base = (directory or Path.cwd()).absolute()
        home = base / Path(env.get("SAO_HOME") or ".sao").expanduser()
        return cls(
            home=home,
            database_url=_database_url(env.get("SAO_DATABASE_URL"), home),
            object_store=_object_store(env.get("SAO_OBJECT_STORE"), home, base),
            tracking_uri=env.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}",
            prefect_api_url=env.get("PREFECT_API_URL") or None,
            s3_endpoint_url=env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None,
            prefect_pages=(env.get("SAO_PREFECT_PAGES") or "").rstrip("/") or None,
            mlflow_pages=(env.get("SAO_MLFLOW_PAGES") or "").rstrip("/") or None,
            prefect_port=_port(env, "SAO_PREFECT_PORT", cls.prefect_port),
            mlflow_port=_port(env, "SAO_MLFLOW_PORT", cls.mlflow_port),
            sandbox=_sandbox(env.get("SAO_SANDBOX") or cls.sandbox),
        )

    def as_environment(self) -> dict[str, str]:
        """The variables from which another process, in whatever directory, reads these places again."""
        variables = {
            "SAO_HOME": str(self.home),
            "SAO_DATABASE_URL": self.database_url,
            "SAO_OBJECT_STORE": self.object_store,
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "SAO_PREFECT_PORT": str(self.prefect_port),
            "SAO_MLFLOW_PORT": str(self.mlflow_port),
            "SAO_SANDBOX": self.sandbox,
        }
        optional = {
            "AWS_ENDPOINT_URL_S3": self.s3_endpoint_url,
            "PREFECT_API_URL": self.prefect_api_url,
            "SAO_PREFECT_PAGES": self.prefect_pages,
            "SAO_MLFLOW_PAGES": self.mlflow_pages,
        }
        return variables | {name: value for name, value in optional.items() if value is not None}

    @property
    def artifacts(self) -> str:
        """Where MLflow keeps the files of runs: a room of the object store, as a folder or `s3://…`."""
        return f"{self.object_store}/artifacts"

    @property
    def cache(self) -> Path:
        """Local copies of what a remote object store holds; may be deleted whenever nothing runs."""
        return self.home / "cache"

    @property
    def scratch(self) -> Path:
        """Folders in the making: a policy before it is published, a checkpoint before it is stored."""
        return self.home / "scratch"

    @property
    def prefect_home(self) -> Path:
        """Prefect's own state, apart from the user's global one."""
        return self.home / "prefect"

    def logs(self, run_id: str) -> Path:
        """The folder of a run's log files, one per child process."""
        return self.home / "logs" / run_id


@dataclass(frozen=True)
class Logins:
    """What the servers ask for; apart from `Settings`, which is printed and handed around. For checks only: the
    libraries of Prefect and MLflow read the same variables themselves."""

    prefect: str | None = field(default=None, repr=False)
    """`PREFECT_API_AUTH_STRING`: user:password."""
    mlflow: str | None = field(default=None, repr=False)
    """`MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD` as user:password."""
    mlflow_token: str | None = field(default=None, repr=False)
    """`MLFLOW_TRACKING_TOKEN`."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Logins:
        """Read the variables (default: this process's)."""
        env = os.environ if environ is None else environ
        user, password = env.get("MLFLOW_TRACKING_USERNAME"), env.get("MLFLOW_TRACKING_PASSWORD")
        return cls(
            prefect=env.get("PREFECT_API_AUTH_STRING") or None,
            mlflow=f"{user}:{password or ''}" if user else None,
            mlflow_token=env.get("MLFLOW_TRACKING_TOKEN") or None,
        )


@dataclass(frozen=True)
class ChatKeys:
    """Keys of the chat models that environments ask (judges); apart from `Settings`, which is printed and handed
    around. Each process reads them itself; they are stored with nothing."""

    everywhere: str | None = field(default=None, repr=False)
    """`SAO_CHAT_API_KEY`: the key for every endpoint that `by_place` does not name."""
    by_place: Mapping[str, str] = field(default_factory=dict, repr=False)
    """`SAO_CHAT_API_KEYS`: a JSON object from host, host:port or address to its key. Where others may start runs,
    set this one alone: a key then goes only where it belongs."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ChatKeys:
        """Read the variables (default: this process's); raises SettingsError, which shows no key."""
        env = os.environ if environ is None else environ
        try:
            by_place = json.loads(env.get("SAO_CHAT_API_KEYS") or "{}")
        except ValueError:
            by_place = None
        if not isinstance(by_place, dict) or not all(isinstance(key, str) for key in by_place.values()):
            raise SettingsError('SAO_CHAT_API_KEYS must be a JSON object of texts such as {"api.openai.com": "sk-…"}')
        everywhere = (env.get("SAO_CHAT_API_KEY") or "").strip() or None
        return cls(everywhere, {place: key.strip() for place, key in by_place.items()})

    def key_for(self, url: str) -> str | None:
        """The key of an endpoint: that of the longest place that it lies in, else the one for all."""
        parts = urlsplit(url)
        lies_in = [
            place
            for place in self.by_place
            if place in (parts.netloc, parts.hostname) or f"{url.rstrip('/')}/".startswith(f"{place.rstrip('/')}/")
        ]
        return self.by_place[max(lies_in, key=len)] if lies_in else self.everywhere


def _port(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name) or str(default)
    if not value.isdecimal() or not 0 < int(value) < 65536:
        raise SettingsError(f"{name} must be a port from 1 to 65535: got {value}")
    return int(value)


def _sandbox(value: str) -> str:
    if value not in SANDBOXES:
        raise SettingsError(f"SAO_SANDBOX must be one of {', '.join(SANDBOXES)}: got {value}")
    return value


def _database_url(value: str | None, home: Path) -> str:
    if not value:
        return f"sqlite:///{home / 'ledger.db'}"
    scheme = value.partition("://")[0]
    if scheme not in {"sqlite", "postgresql", "postgres", "postgresql+psycopg"}:
        raise SettingsError(
            f"SAO_DATABASE_URL must start with sqlite:/// or postgresql://: got {scheme}; "
            "unset it to use SQLite in SAO_HOME"
        )
    return value


def _object_store(value: str | None, home: Path, base: Path) -> str:
    if not value:
        return str(home / "objects")
    scheme, found, rest = value.partition("://")
    if not found:
        return str(base / Path(value).expanduser())
    if scheme == "file":
        return str(base / Path(rest))
    if scheme != "s3" or not rest:
        raise SettingsError(f"SAO_OBJECT_STORE must be a folder or s3://bucket/prefix: got {value}")
    return value.rstrip("/")
