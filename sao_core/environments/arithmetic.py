"""Arithmetic on text that nobody vouches for: a small parser, bounded in length; nothing is evaluated as Python."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable


class MalformedExpression(ValueError):
    """Text that is no arithmetic expression; the message is what the policy reads."""


_TOKEN = re.compile(r"\s*([0-9]+|[-+*()])")
_BINARY: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_MAX_EXPRESSION_CHARACTERS = 64
_MAX_DIGITS = 12


def evaluate(expression: str) -> int:
    """Value of an expression of whole numbers, ``+ - *`` and parentheses, with the usual precedence.

    Raises :class:`MalformedExpression`. Length and nesting are bounded, so no text that a policy
    writes can take long.
    """
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        raise MalformedExpression("too long")
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise MalformedExpression("bad symbol")
        tokens.append(match.group(1))
        position = match.end()
    value, rest = _sum(tokens, 0)
    if rest != len(tokens):
        raise MalformedExpression("bad order")
    return value


def _sum(tokens: list[str], at: int) -> tuple[int, int]:
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] in "+-":
        right, after = _product(tokens, at + 1)
        value, at = _BINARY[tokens[at]](value, right), after
    return value, at


def _product(tokens: list[str], at: int) -> tuple[int, int]:
    value, at = _number(tokens, at)
    while at < len(tokens) and tokens[at] == "*":
        right, at = _number(tokens, at + 1)
        value *= right
    return value, at


def _number(tokens: list[str], at: int) -> tuple[int, int]:
    if at >= len(tokens):
        raise MalformedExpression("number missing")
    token = tokens[at]
    if token.isdigit():
        if len(token) > _MAX_DIGITS:
            raise MalformedExpression("too long")
        return int(token), at + 1
    if token == "-":
        value, at = _number(tokens, at + 1)
        return -value, at
    if token == "(":
        value, at = _sum(tokens, at + 1)
        if at >= len(tokens) or tokens[at] != ")":
            raise MalformedExpression("bracket open")
        return value, at + 1
    raise MalformedExpression("number missing")
