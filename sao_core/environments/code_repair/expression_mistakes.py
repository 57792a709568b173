"""Mistakes that people make within an expression: boundaries, operators, indices, variables, arguments, conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sao_core.environments.code_repair.edits import Edit, Source

_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_OPPOSITE = {
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
}
_WRONG_OPERATOR = {"+": ("-",), "-": ("+",), "*": ("+",), "//": ("/", "%"), "/": ("//",), "%": ("//",), "**": ("*",)}
_WRONG_NAME = {
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "lower": ("upper",),
    "upper": ("lower",),
    "strip": ("lstrip", "rstrip"),
    "rstrip": ("lstrip", "strip"),
    "startswith": ("endswith",),
    "find": ("rfind",),
    "partition": ("rpartition",),
    "popleft": ("pop",),
    "append": ("extend",),
    "extend": ("append",),
    "add": ("discard",),
    "isalnum": ("isalpha", "isdigit"),
    "isdigit": ("isalnum",),
    "isupper": ("islower",),
    "capitalize": ("lower", "upper"),
    "appendleft": ("append",),
}
_WRAPPERS = {"sorted", "reversed", "list", "dict", "set", "abs"}
_SIMPLE = (ast.Name, ast.Constant, ast.Call, ast.Subscript, ast.Attribute)
_LARGEST_SMALL_NUMBER = 31


def expression_mistakes(source: Source) -> Iterator[Edit]:
    """All of them, as edits of ``source``."""
    variables = _variables(source)
    for statement in source.body:
        for node, parent in _walk(statement, source.function):
            match node:
                case ast.Compare():
                    yield from _comparison(source, node)
                case ast.BinOp():
                    yield from _arithmetic(source, node)
                case ast.BoolOp():
                    yield from _logic(source, node)
                case ast.UnaryOp():
                    kind = "inverted condition" if isinstance(node.op, ast.Not) else "wrong sign"
                    yield source.replace(kind, node, source.of(node.operand))
                case ast.IfExp():
                    yield from _choice(source, node)
                case ast.Call():
                    yield from _call(source, node)
                case ast.Slice():
                    yield from _slice(source, node)
                case ast.Tuple() if len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
                    yield _swapped(source, "swapped values", node.elts[0], node.elts[1])
                case ast.Constant():
                    yield from _constant(source, node, parent)
                case ast.Name() if isinstance(node.ctx, ast.Load):
                    yield from _variable(source, node, parent, variables)
                case _:
                    pass
            for test in _tests(node):
                if isinstance(test, (*_SIMPLE, ast.BoolOp)):
                    text = source.of(test)
                    negated = f"not ({text})" if isinstance(test, ast.BoolOp) else f"not {text}"
                    yield source.replace("inverted condition", test, negated)


def _walk(node: ast.AST, parent: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """All nodes with their parents, but annotations and the insides of f-strings (which have no place in 3.11)."""
    yield node, parent
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, node)


def _variables(source: Source) -> tuple[str, ...]:
    """Parameters, then variables in the order in which they are set."""
    names = [argument.arg for argument in source.function.args.args]
    stored = (node for node in ast.walk(source.function) if isinstance(node, ast.Name))
    names += [node.id for node in stored if isinstance(node.ctx, ast.Store)]
    return tuple(dict.fromkeys(name for name in names if name != "_"))


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp):
        return [node.test]
    return list(node.ifs) if isinstance(node, ast.comprehension) else []


def _comparison(source: Source, node: ast.Compare) -> Iterator[Edit]:
    for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
        text = _COMPARE[type(operator)]
        if text in _BOUNDARY:
            yield source.between("off by one", left, right, text, _BOUNDARY[text])
        yield source.between("wrong comparison", left, right, text, _OPPOSITE[text])


def _arithmetic(source: Source, node: ast.BinOp) -> Iterator[Edit]:
    text = _ARITHMETIC.get(type(node.op), "")
    for wrong in _WRONG_OPERATOR.get(text, ()):
        yield source.between("wrong operator", node.left, node.right, text, wrong)
    if text in ("+", "-", "*", "/", "//", "%") and isinstance(node.left, _SIMPLE) and isinstance(node.right, _SIMPLE):
        yield _swapped(source, "swapped operands", node.left, node.right)
    if text in ("+", "-"):
        start, stop = source.span(node)[0], source.span(node.right)[0]
        before = source.text(start, stop)
        kind = "off by one" if isinstance(node.right, ast.Constant) else "lost term"
        yield source.replace(kind, node, before[: before.rindex(text)].rstrip())


def _logic(source: Source, node: ast.BoolOp) -> Iterator[Edit]:
    text, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    yield source.between("wrong operator", node.values[0], node.values[1], text, other)
    if len(node.values) == 2:
        for value in node.values:
            yield source.replace("lost condition", node, source.of(value))
    else:
        start, stop = source.span(node.values[-2])[1], source.span(node)[1]
        yield Edit("lost condition", start, stop, "")


def _choice(source: Source, node: ast.IfExp) -> Iterator[Edit]:
    yield _swapped(source, "swapped branches", node.body, node.orelse)
    yield source.replace("lost edge case", node, source.of(node.body))
    yield source.replace("lost edge case", node, source.of(node.orelse))


def _call(source: Source, node: ast.Call) -> Iterator[Edit]:
    if len(node.args) > 1:
        yield _swapped(source, "swapped arguments", node.args[0], node.args[1])
    if node.args and isinstance(node.func, ast.Name) and node.func.id in _WRAPPERS and not node.keywords:
        yield source.replace("lost copy or order", node, source.of(node.args[0]))
    for keyword in node.keywords:
        start, stop = source.span(node.args[-1])[1] if node.args else 0, source.span(keyword.value)[1]
        if start:
            yield Edit("lost argument", start, stop, "")
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    for wrong in _WRONG_NAME.get(name, ()):
        yield source.replace("wrong function", node.func, source.of(node.func).removesuffix(name) + wrong)
    if isinstance(node.func, ast.Attribute) and name == "pop" and not node.args:
        yield source.replace("wrong index", node, f"{source.of(node.func)}(0)")


def _slice(source: Source, node: ast.Slice) -> Iterator[Edit]:
    lower, upper, step = (source.of(part) if part else "" for part in (node.lower, node.upper, node.step))
    ending = f":{step}" if step else ""
    if lower:
        yield source.replace("wrong slice", node, f":{upper}{ending}")
    if upper:
        yield source.replace("wrong slice", node, f"{lower}:{ending}")
    if bool(lower) != bool(upper):
        yield source.replace("wrong slice", node, f"{upper}:{lower}{ending}")
    if step:
        yield source.replace("wrong slice", node, f"{lower}:{upper}")
    if upper and not upper.endswith(("+ 1", "- 1")):
        yield source.replace("wrong slice", node, f"{lower}:{upper} - 1{ending}")


def _constant(source: Source, node: ast.Constant, parent: ast.AST) -> Iterator[Edit]:
    value = node.value
    if isinstance(value, bool):
        yield source.replace("wrong initial value", node, str(not value))
    elif isinstance(value, int) and value <= _LARGEST_SMALL_NUMBER:
        kind = "off by one"
        if isinstance(parent, ast.Subscript):
            kind = "wrong index"
        elif isinstance(parent, ast.Assign | ast.AnnAssign):
            kind = "wrong initial value"
        for wrong in (value + 1, value - 1):
            if wrong > 0 or (wrong == 0 and not isinstance(parent, ast.BinOp | ast.UnaryOp)):
                yield source.replace(kind, node, str(wrong))
    elif value in ("", " "):
        yield source.replace("wrong separator", node, '" "' if value == "" else '""')


def _variable(source: Source, node: ast.Name, parent: ast.AST, variables: tuple[str, ...]) -> Iterator[Edit]:
    if node.id not in variables or (isinstance(parent, ast.Call) and parent.func is node):
        return
    place = variables.index(node.id)
    for wrong in dict.fromkeys((variables[place - 1], variables[(place + 1) % len(variables)])):
        if wrong != node.id:
            yield source.replace("wrong variable", node, wrong)


def _swapped(source: Source, kind: str, first: ast.expr, second: ast.expr) -> Edit:
    (start, stop), (later_start, later_stop) = source.span(first), source.span(second)
    text = source.text(later_start, later_stop) + source.text(stop, later_start) + source.text(start, stop)
    return Edit(kind, start, later_stop, text)
