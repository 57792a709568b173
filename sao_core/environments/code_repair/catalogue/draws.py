"""Small random values that the catalogues' argument generators are made of: few letters, small numbers, many ties."""

from __future__ import annotations

import random

Graph = dict[str, list[str]]


def ints(rng: random.Random, low: int = -9, high: int = 9, most: int = 8, least: int = 0) -> list[int]:
    """``least`` … ``most`` integers from ``low`` to ``high``."""
    return [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def sorted_ints(rng: random.Random, low: int = -9, high: int = 9, most: int = 8) -> list[int]:
    """The same in ascending order."""
    return sorted(ints(rng, low, high, most))


def word(rng: random.Random, letters: str = "abc", most: int = 6, least: int = 1) -> str:
    """``least`` … ``most`` characters out of ``letters``."""
    return "".join(rng.choice(letters) for _ in range(rng.randint(least, most)))


def words(rng: random.Random, most: int = 5, least: int = 0, letters: str = "abc") -> list[str]:
    """``least`` … ``most`` words."""
    return [word(rng, letters) for _ in range(rng.randint(least, most))]


def sentence(rng: random.Random, most: int = 5) -> str:
    """Words with single spaces between them, some in capitals; sometimes nothing."""
    return " ".join(rng.choice((w, w.upper(), w.capitalize())) for w in words(rng, most, letters="abeo"))


def intervals(rng: random.Random, most: int = 6) -> list[tuple[int, int]]:
    """Intervals (start, end) with start < end, in no order, many of them touching."""
    starts = [rng.randint(0, 16) for _ in range(rng.randint(0, most))]
    return [(start, start + rng.randint(1, 5)) for start in starts]


def matrix(rng: random.Random, rows: int, columns: int, low: int = -4, high: int = 9) -> list[list[int]]:
    """Rows of integers."""
    return [[rng.randint(low, high) for _ in range(columns)] for _ in range(rows)]


def any_matrix(rng: random.Random, most: int = 4) -> list[list[int]]:
    """A matrix of 1 … ``most`` rows and columns."""
    return matrix(rng, rng.randint(1, most), rng.randint(1, most))


def square(rng: random.Random, most: int = 4, low: int = -4) -> list[list[int]]:
    """A square matrix."""
    size = rng.randint(1, most)
    return matrix(rng, size, size, low)


def graph(rng: random.Random, most: int = 6, density: float = 0.3) -> Graph:
    """A directed graph: each node with the nodes that its edges lead to, in alphabetical order."""
    nodes = "abcdefgh"[: max(rng.randint(1, most), rng.randint(1, most))]
    return {node: [other for other in nodes if other != node and rng.random() < density] for node in nodes}


def undirected(rng: random.Random, most: int = 6, density: float = 0.3) -> Graph:
    """A graph whose edges lead both ways."""
    nodes = "abcdefgh"[: max(rng.randint(1, most), rng.randint(1, most))]
    pairs = [(a, b) for a in nodes for b in nodes if a < b and rng.random() < density]
    return {node: sorted([b for a, b in pairs if a == node] + [a for a, b in pairs if b == node]) for node in nodes}


def nested(rng: random.Random, depth: int = 3) -> dict[str, object]:
    """Dictionaries within dictionaries, with small integers at the leaves."""
    tree: dict[str, object] = {}
    for key in rng.sample("abcd", rng.randint(0 if depth < 3 else 1, 3)):
        tree[key] = nested(rng, depth - 1) if depth > 1 and rng.random() < 0.45 else rng.randint(0, 5)
    return tree
