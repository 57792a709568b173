"""The functions that bundled tasks are made of, by module; and which of them are only ever evaluated on.

A function is held out together with its helpers, so that an evaluation asks for functions nobody trained on.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import dataclass
from functools import cache

from sao_core.environments.code_repair.catalogue.entry import Entry

MODULES = (
    "text_tools",
    "list_tools",
    "dict_tools",
    "number_tools",
    "statistics_tools",
    "date_tools",
    "parse_tools",
    "interval_tools",
    "matrix_tools",
    "graph_tools",
)
HELD_OUT = frozenset(
    (
        "wrap_words",
        "is_anagram",
        "longest_run",
        "merge_sorted",
        "rotate",
        "second_largest",
        "merge_nested",
        "diff_keys",
        "to_base",
        "from_base",
        "digital_root",
        "histogram",
        "ranks",
        "outliers",
        "median",
        "parse_clock",
        "minutes_between",
        "to_twelve_hours",
        "format_duration",
        "is_balanced",
        "strip_comment",
        "parse_version",
        "compare_versions",
        "intersection",
        "most_at_once",
        "count_neighbours",
        "life_step",
        "spiral",
        "sources",
        "reverse_edges",
        "topological_order",
    )
)


@dataclass(frozen=True)
class Function:
    """A function of the catalogue as text."""

    module: str
    entry: Entry
    source: str
    imports: tuple[str, ...]
    """Import statements that the source needs."""
    helpers: tuple[Function, ...]
    """Those that it calls, directly or not; each comes after the ones that call it."""

    @property
    def name(self) -> str:
        """Its name, which no other function of the catalogue has."""
        return self.entry.name


@cache
def functions() -> dict[str, Function]:
    """All functions by name, in the order of the catalogue."""
    found: dict[str, Function] = {}
    for module in MODULES:
        loaded = importlib.import_module(f"{__name__}.{module}")
        imports = _imports(inspect.getsource(loaded))
        entries: tuple[Entry, ...] = loaded.ENTRIES
        for entry in entries:
            source = inspect.getsource(entry.function)
            used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
            needed = tuple(statement for name, statement in imports.items() if name in used)
            helpers = tuple(found[helper.__name__] for helper in entry.helpers)
            found[entry.name] = Function(module, entry, source, needed, helpers)
    return found


def pool(held_out: bool) -> tuple[Function, ...]:
    """The functions to train on, or those to evaluate on."""
    return tuple(function for name, function in functions().items() if (name in HELD_OUT) == held_out)


def _imports(module: str) -> dict[str, str]:
    """What a module imports from the standard library: name → statement."""
    found = {}
    for node in ast.parse(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("sao_core", "__future__")):
            for alias in node.names:
                found[alias.name] = f"from {node.module} import {alias.name}"
    return found
