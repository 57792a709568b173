"""Every setting with its default and what it is for, as one Markdown page; `docs/settings.md` is this page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from sao_core.changes import CHANGEABLE
from sao_core.config import TrainConfig
from sao_core.environments import base as environments

HEAD = """# Settings

Every setting of a training run, its default and what it is for; `sao settings` prints this page. A recipe is a YAML
file of these, and `sao train RECIPE --set section.key=value` overrides one. Settings of an environment stand under
`environment.options`. Those marked ↻ may be changed when a run is resumed: `sao train --resume RUN --set …`.
"""


def settings_page() -> str:
    """The page."""
    parts = [HEAD]
    for title, rows in _tables(TrainConfig, ""):
        parts.append(_table(title, rows))
    for name in environments.names():
        rows = list(_rows(environments.get(name).options_model, "environment.options."))
        parts.append(_table(f"environment.options of `{name}`", rows))
    return "\n".join(parts)


def _tables(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    own = list(_rows(model, prefix))
    if own:
        yield (prefix.rstrip(".") or "the run itself"), own
    for key, field in model.model_fields.items():
        if _is_section(field.annotation):
            yield from _tables(field.annotation, f"{prefix}{key}.")  # type: ignore[arg-type]


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for key, field in model.model_fields.items():
        if _is_section(field.annotation):
            continue
        default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
        yield prefix + key, _shown(default), field.description or ""


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "empty"
    text = default if isinstance(default, str) else json.dumps(default, default=_plain)
    return f"`{text}`" if text else "empty"


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"## {title}\n", "| setting | default | |", "|---|---|---|"]
    for name, default, text in rows:
        mark = " ↻" if name in CHANGEABLE else ""
        lines.append(f"| `{name}`{mark} | {default} | {text.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"
