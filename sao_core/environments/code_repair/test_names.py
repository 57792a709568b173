"""Which tests a test file names, found by reading it: a run that leaves one out has not passed."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def named_tests(files: Mapping[str, str], runner: str) -> dict[str, list[str]]:
    """Path → tests of that file, as ``function`` or ``Class::method``. Raises SyntaxError for a file that is no Python.

    Files without tests, such as helpers and conftest.py, are left out.
    """
    found = {path: _names(ast.parse(text, path), runner) for path, text in files.items() if path.endswith(".py")}
    return {path: names for path, names in found.items() if names}


def _names(module: ast.Module, runner: str) -> list[str]:
    names = _functions(module.body)
    for node in module.body:
        if isinstance(node, ast.ClassDef) and (node.bases or (runner == "pytest" and node.name.startswith("Test"))):
            names += [f"{node.name}::{name}" for name in _functions(node.body)]
    return names


def _functions(body: list[ast.stmt]) -> list[str]:
    return [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    ]
