"""Checks that `sao doctor` makes: what is installed, what is reachable, what would fail.

Places are asked as their clients ask (:mod:`infra.reach`), so the same checks serve as health checks of containers.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from infra import reach
from infra.sandbox.doctor import examine as examine_sandbox
from infra.services import WORK_POOL
from infra.settings import Logins, Settings
from sao_core.config import ConfigError

PACKAGES = ("torch", "transformers", "deepspeed", "prefect", "mlflow", "sqlalchemy", "s3fs", "pyarrow")
LEAST_FREE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Check:
    """One thing looked at, and what was found."""

    name: str
    ok: bool
    found: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine(places: Settings, only: Iterable[str] = ()) -> list[Check]:
    """Make every check, or those of the groups named (`ledger`, `object-store`, …); none of them raises.

    Raises:
        ConfigError: there is no group of that name.
    """
    groups = _groups(places, Logins.from_environment())
    served = places.prefect_api_url is not None
    chosen = list(only) or [name for name in groups if served or name not in ("prefect-services", "workers")]
    unknown = [name for name in chosen if name not in groups]
    if unknown:
        raise ConfigError(f"there is no check {', '.join(unknown)}; there are: {', '.join(groups)}")
    return [_look(name, check) for group in chosen for name, check in groups[group].items()]


def _groups(places: Settings, logins: Logins) -> dict[str, dict[str, Callable[[], str]]]:
    """By the name for `--only`: what is looked at, by its name for people."""
    packages = {name: partial(version, name) for name in PACKAGES}
    return {
        "python": {"python": lambda: sys.version.split()[0], **packages},
        "cores": {"cores": lambda: str(len(os.sched_getaffinity(0)))},
        "sandbox": {"code sandbox": lambda: examine_sandbox(places.sandbox)},
        "state-folder": {"state folder": lambda: _disk(places)},
        "ledger": {"ledger": lambda: reach.ledger(places)},
        "object-store": {"object store": lambda: reach.objects(places)},
        "prefect": {"Prefect": lambda: reach.prefect(places, logins)},
        "prefect-services": {"Prefect services": lambda: reach.events(places, logins)},
        "workers": {"Prefect workers": lambda: reach.workers(places, logins, WORK_POOL)},
        "mlflow": {"MLflow": lambda: reach.mlflow(places, logins)},
    }


def _look(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except PackageNotFoundError:
        return Check(name, False, "not installed")
    except Exception as error:
        kind = "" if isinstance(error, reach.EXPECTED) else f"{type(error).__name__}: "
        return Check(name, False, f"{kind}{' '.join(str(error).split())[:500]}")


def _disk(places: Settings) -> str:
    places.home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(places.home).free
    if free < LEAST_FREE_BYTES:
        raise OSError(f"only {free / 1024**3:.1f} GiB free in {places.home}; make room or set SAO_HOME")
    return f"{places.home}, {free / 1024**3:.0f} GiB free"
