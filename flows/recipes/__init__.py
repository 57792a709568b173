"""Recipes: YAML files of :class:`sao_core.config.TrainConfig`, and how they, files and overrides become one config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from sao_core.config import ConfigError, TrainConfig, nearest, parse_config, setting_names


def recipe_names() -> list[str]:
    """The recipes that ship with the package."""
    return sorted(f.name.removesuffix(".yaml") for f in files(__name__).iterdir() if f.name.endswith(".yaml"))


def load_config(recipe: str, overrides: Iterable[str] = ()) -> TrainConfig:
    """The config of a shipped recipe or a YAML file, with ``section.key=value`` overrides applied.

    Raises :class:`ConfigError` with one line that names the value and the way out.
    """
    return override_config(recipe_values(recipe), overrides)


def override_config(values: Mapping[str, Any], overrides: Iterable[str]) -> TrainConfig:
    """The config of these values with ``section.key=value`` overrides applied; raises :class:`ConfigError` likewise."""
    changed = dict(values)
    for override in overrides:
        _apply(changed, override)
    return parse_config(changed)


def recipe_values(recipe: str) -> dict[str, Any]:
    """The mapping in a recipe; ``recipe`` defaults to its name."""
    if recipe.endswith((".yaml", ".yml")):
        path = Path(recipe)
        if not path.is_file():
            raise ConfigError(f"no such recipe file: {recipe}; `sao recipes` lists the shipped ones")
        text, name = path.read_text(), path.stem
    else:
        if recipe not in recipe_names():
            raise ConfigError(f"unknown recipe `{recipe}`{nearest(recipe, recipe_names())}")
        text, name = files(__name__).joinpath(f"{recipe}.yaml").read_text(), recipe
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{recipe} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{recipe} must hold a mapping of settings: got {type(values).__name__}")
    return {"recipe": name, **values}


def recipe_summary(recipe: str) -> str:
    """The first comment line of a shipped recipe."""
    first = files(__name__).joinpath(f"{recipe}.yaml").read_text().splitlines()[0]
    return first.lstrip("# ").strip()


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set needs section.key=value: got {override!r}")
    *sections, last = key.strip().split(".")
    if sections[:2] != ["environment", "options"] and key not in setting_names(TrainConfig):
        raise ConfigError(f"unknown setting `{key}`{nearest(key, setting_names(TrainConfig))}")
    target = values
    for section in sections:
        inner = target.get(section)
        target[section] = dict(inner) if isinstance(inner, dict) else {}
        target = target[section]
    target[last] = scalar(text)


def scalar(text: str) -> Any:
    """The YAML value of an override; ``1e-4`` is a number here, which YAML 1.1 takes for a string."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
