"""Tells values and formulas from programs: what a model wrote may only go to an evaluating scorer if it is one.

Some packages score an answer with Python's ``eval`` or SymPy's ``parse_expr``, which run whatever code they are
given. :func:`is_harmless` accepts literals and short formulas only; it evaluates nothing.
"""

from __future__ import annotations

import ast
import math

MAX_CHARACTERS = 2000
_MAX_POWER = 1000.0
"""Of the exponents along one path through a formula, multiplied: 9**9**9 would keep a process busy for good."""
_MAX_NESTED_CALLS = 3
_TRIGONOMETRIC = ("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan")
_HYPERBOLIC = ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")
_FUNCTIONS = frozenset((*_TRIGONOMETRIC, *_HYPERBOLIC, "exp", "log", "ln", "sqrt", "Abs", "abs"))


def is_harmless(text: str) -> bool:
    """True for Python literals (numbers, texts, nested lists and tuples of them) and for formulas of a bounded size.

    Formulas have numbers, names, ``+ - * / **`` and the usual functions of one or two arguments.
    """
    if len(text) > MAX_CHARACTERS or text != text.strip():
        return False
    try:
        node = ast.parse(text, mode="eval").body
        return _is_literal(node) or _is_formula(node, 1.0, 0)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False


def _is_literal(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return True
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return all(_is_literal(element) for element in elements)
    return False


def _is_formula(node: ast.expr, power: float, calls: int) -> bool:
    """``power`` is what the exponents around ``node`` multiply to, ``calls`` how many functions are around it."""
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return "_" not in name
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_formula(operand, power, calls)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            total = power * max(1.0, _bound(exponent))
            return total <= _MAX_POWER and _is_formula(base, total, calls) and _is_formula(exponent, power, calls)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _is_formula(left, power, calls) and _is_formula(right, power, calls)
        case ast.Call(func=ast.Name(id=name), args=[*arguments], keywords=[]):
            return (
                name in _FUNCTIONS
                and calls < _MAX_NESTED_CALLS
                and 1 <= len(arguments) <= 2
                and all(_is_formula(argument, power, calls + 1) for argument in arguments)
            )
    return False


def _is_at_least_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value >= 1


def _bound(node: ast.expr) -> float:
    """What the absolute value of a formula cannot exceed while its names stand for at most 1; infinite if unclear."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(float(value))
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _bound(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _bound(left) + _bound(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bound(left) * _bound(right)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            if not (_is_at_least_one(base) or isinstance(exponent, ast.Constant)):
                return math.inf  # a negative power of something small is large
            try:
                return max(1.0, _bound(base)) ** _bound(exponent)
            except OverflowError:
                return math.inf
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() | float() as value)) if value:
            return _bound(left) / abs(float(value))
        case ast.Call() if any(isinstance(part, ast.Name) for argument in node.args for part in ast.walk(argument)):
            return 1.0
    return math.inf
