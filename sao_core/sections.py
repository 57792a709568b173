"""What every group of settings shares: strict and frozen models, and their errors as one line with the way out."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(ValueError):
    """Input that cannot be run; the message is one line with the value and the way out."""


def _as_a_form(schema: dict[str, Any]) -> None:
    """Forms sort fields by ``position`` and label them by ``title``: as declared, by the names that `--set` takes."""
    for position, (name, field) in enumerate(schema.get("properties", {}).items()):
        field.update(position=position, title=name)


class Section(BaseModel):
    """Base of every group of settings: frozen, no unknown keys, fields in declared order."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_as_a_form)


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a validation error as one line: setting, rule, value, way out."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown setting `{where}`{nearest(where, setting_names(model))}"
    if first["type"] == "missing":
        return f"{where} is required"
    message = first["msg"].removeprefix("Value error, ")
    if not where:
        return message
    rule = message[0].lower() + message[1:]
    rule = rule.removeprefix("input should be ").removeprefix("value ")
    if "got" in rule:
        return f"{where} {rule}"
    return f"{where} must be {rule}: got {first['input']!r}"


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean …?` with the closest known name, or the names there are."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if matches:
        return f"; did you mean `{matches[0]}`?"
    return f"; there are: {', '.join(known)}" if len(known) <= 20 else ""


def setting_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all settings of a model, sections included."""
    names: list[str] = []
    for key, info in model.model_fields.items():
        names.append(prefix + key)
        for kind in (info.annotation, *get_args(info.annotation)):  # a section may be optional
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += setting_names(kind, f"{prefix}{key}.")
    return names
