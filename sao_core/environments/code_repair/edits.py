"""A change of a source text, and where the nodes of its syntax tree stand in it.

Mutants are made by changing text, never by printing a tree, so that all but the mistake stays as a person wrote it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Replace the bytes ``start:stop`` of a source by ``text``."""

    kind: str
    start: int
    stop: int
    text: str


class Source:
    """The text of one function and its tree."""

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        function = ast.parse(text).body[0]
        if not isinstance(function, ast.FunctionDef):
            raise ValueError(f"a source must be one function: got {type(function).__name__}")
        self.function = function
        first = function.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        self.body = function.body[1:] if documented else function.body
        """The statements after the docstring."""

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node starts and stops."""
        stop = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return self._starts[node.lineno - 1] + node.col_offset, stop

    def lines(self, first: ast.stmt, last: ast.stmt | None = None) -> tuple[int, int]:
        """Where the lines of one statement, or of several up to ``last``, start and stop."""
        last = last or first
        return self._starts[first.lineno - 1], self._starts[last.end_lineno or last.lineno]

    def line_start(self, line: int) -> int:
        """Where a line starts; the first is 1."""
        return self._starts[line - 1]

    def text(self, start: int, stop: int) -> str:
        """What stands from ``start`` to ``stop``."""
        return self._bytes[start:stop].decode()

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        return self.text(*self.span(node))

    def replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        """Put ``text`` in the place of a node."""
        return Edit(kind, *self.span(node), text)

    def between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit:
        """Replace ``old`` by ``new`` between two nodes, where an operator stands."""
        start, stop = self.span(left)[1], self.span(right)[0]
        return Edit(kind, start, stop, self.text(start, stop).replace(old, new, 1))

    def applied(self, edit: Edit) -> str:
        """The text after an edit."""
        return (self._bytes[: edit.start] + edit.text.encode() + self._bytes[edit.stop :]).decode()
