"""Packages that an adapter needs and that not every installation has: imported when they are used, never before."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

from sao_core.config import ConfigError


def require(module: str, environment: str, extra: str) -> ModuleType:
    """Import ``module`` for ``environment``; raises :class:`ConfigError` that says which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != top:
            raise ConfigError(f"environment.name `{environment}`: `{top}` cannot be imported ({error})") from error
        raise _missing(environment, extra) from None


def require_installed(module: str, environment: str, extra: str) -> None:
    """The same for a module that another process will import; nothing is imported here."""
    if importlib.util.find_spec(module) is None:
        raise _missing(environment, extra)


def _missing(environment: str, extra: str) -> ConfigError:
    return ConfigError(
        f"environment.name `{environment}` needs a package that is not installed: pip install 'sao-pipeline[{extra}]'"
    )


def version_of(distribution: str) -> str:
    """Version of an installed package, without importing it; `none` where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
