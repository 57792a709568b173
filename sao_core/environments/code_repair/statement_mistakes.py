"""Mistakes that people make with whole statements: lost cases, returns and updates, wrong indentation and order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from sao_core.environments.code_repair.edits import Edit, Source

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_SHALLOW = (ast.Assign, ast.AugAssign, ast.Expr, ast.AnnAssign)
_AUGMENTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+=", "-="),
    ast.Sub: ("-=", "+="),
    ast.Mult: ("*=", "+="),
    ast.FloorDiv: ("//=", "-="),
}
_INDENT = "    "


def statement_mistakes(source: Source) -> Iterator[Edit]:
    """All of them, as edits of ``source``."""
    yield from _mutable_default(source)
    for block in _blocks(source.body):
        for before, after in pairwise(block):
            yield from _pair(source, before, after)
        for statement in block:
            yield from _single(source, statement, block)


def _blocks(block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    yield block
    for statement in block:
        for name in ("body", "orelse"):
            inner = getattr(statement, name, [])
            if inner:
                yield from _blocks(inner)


def _pair(source: Source, before: ast.stmt, after: ast.stmt) -> Iterator[Edit]:
    if isinstance(before, ast.For | ast.While) and isinstance(after, ast.Return):
        start, stop = source.lines(after)
        yield Edit("early return", start, stop, _INDENT + source.text(start, stop))
    if isinstance(before, _SHALLOW) and isinstance(after, _SHALLOW):
        start, stop = source.lines(before)
        later_start, later_stop = source.lines(after)
        text = source.text(later_start, later_stop) + source.text(start, stop)
        yield Edit("swapped statements", start, later_stop, text)


def _single(source: Source, statement: ast.stmt, block: list[ast.stmt]) -> Iterator[Edit]:
    match statement:
        case ast.If():
            yield from _branches(source, statement, block)
        case ast.Return() if statement is source.body[-1] and len(source.body) > 1:
            yield _deleted(source, "missing return", statement, block)
        case ast.Break():
            yield source.replace("early continue", statement, "continue")
            yield _deleted(source, "lost exit", statement, block)
        case ast.Continue():
            yield source.replace("early exit", statement, "break")
        case ast.AugAssign():
            yield _deleted(source, "lost update", statement, block)
            right, wrong = _AUGMENTED.get(type(statement.op), ("", ""))
            if right:
                yield source.between("wrong operator", statement.target, statement.value, right, wrong)
                yield source.between("wrong operator", statement.target, statement.value, right, "=")
        case ast.Assign() | ast.Expr() if block is not source.body:
            yield _deleted(source, "lost update", statement, block)
        case ast.For() | ast.While() if len(statement.body) > 1 and isinstance(statement.body[-1], _SHALLOW):
            yield _dedented(source, statement.body[-1])
        case _:
            pass


def _branches(source: Source, statement: ast.If, block: list[ast.stmt]) -> Iterator[Edit]:
    if not statement.orelse:
        kind = "lost edge case" if isinstance(statement.body[-1], _LEAVES) else "lost branch"
        if source.of(statement).startswith("if"):
            yield _deleted(source, kind, statement, block)
        else:  # an `elif` without an `else`
            yield Edit(kind, *source.lines(statement), "")
        return
    first, last = statement.orelse[0], statement.orelse[-1]
    if isinstance(first, ast.If) and source.of(first).startswith("elif"):
        start = source.line_start(first.lineno)
        stop = source.lines(first.body[-1])[1]
        yield Edit("lost branch", start, stop, "")
    else:
        start, stop = source.lines(statement.body[-1])[1], source.lines(last)[1]
        yield Edit("missing else", start, stop, "")


def _deleted(source: Source, kind: str, statement: ast.stmt, block: list[ast.stmt]) -> Edit:
    start, stop = source.lines(statement)
    return Edit(kind, start, stop, f"{' ' * statement.col_offset}pass\n" if len(block) == 1 else "")


def _dedented(source: Source, statement: ast.stmt) -> Edit:
    start, stop = source.lines(statement)
    lines = source.text(start, stop).splitlines(keepends=True)
    return Edit("wrong indentation", start, stop, "".join(line.removeprefix(_INDENT) for line in lines))


def _mutable_default(source: Source) -> Iterator[Edit]:
    """A list or dictionary that starts empty becomes a default, which is made once and kept between calls."""
    header = source.text(source.line_start(1), source.line_start(2))
    if not header.rstrip().endswith(":") or ") ->" not in header:
        return
    for statement in source.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                pass
            case _:
                continue
        value = source.of(statement.value) if statement.value else ""
        if value in ("[]", "{}", "set()"):
            start, stop = source.lines(statement)
            parameter = f"{name}={value}" if isinstance(statement, ast.Assign) else _parameter(source, statement)
            changed = header.replace(") ->", f", {parameter}) ->", 1)
            between = source.text(source.line_start(2), start)
            yield Edit("mutable default", 0, stop, changed + between)


def _parameter(source: Source, statement: ast.AnnAssign) -> str:
    return source.of(statement)
