"""Catalogue: functions on dictionaries and records."""

from __future__ import annotations

from collections.abc import Mapping

from sao_core.environments.code_repair.catalogue.draws import ints, nested, words
from sao_core.environments.code_repair.catalogue.entry import Entry


def invert(mapping: dict[str, int]) -> dict[int, list[str]]:
    """Turn a mapping round: each value with the sorted list of the keys that had it.

    >>> invert({"b": 1, "a": 1, "c": 2})
    {1: ['a', 'b'], 2: ['c']}
    """
    result: dict[int, list[str]] = {}
    for key in sorted(mapping):
        result.setdefault(mapping[key], []).append(key)
    return result


def merge_counts(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    """Add up the counts of two mappings; a key that comes to 0 is left out. The mappings are not changed.

    >>> merge_counts({"a": 2, "b": 1}, {"a": 3, "b": -1})
    {'a': 5}
    """
    result = dict(first)
    for key, count in second.items():
        result[key] = result.get(key, 0) + count
        if result[key] == 0:
            del result[key]
    return {key: count for key, count in result.items() if count != 0}


def group_by_length(items: list[str]) -> dict[int, list[str]]:
    """Group words by their length; each group keeps the order, and a word that comes again stays out.

    >>> group_by_length(["to", "be", "or", "not", "to"])
    {2: ['to', 'be', 'or'], 3: ['not']}
    """
    groups: dict[int, list[str]] = {}
    for item in items:
        group = groups.setdefault(len(item), [])
        if item not in group:
            group.append(item)
    return groups


def deep_get(tree: dict[str, object], path: str, default: object) -> object:
    """Look up a value by a path such as "a.b.c" through nested dictionaries; the default if a part of it is not there.

    >>> deep_get({"a": {"b": 1}}, "a.b", None)
    1
    >>> deep_get({"a": {"b": 1}}, "a.b.c", 0)
    0
    """
    node: object = tree
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            return default
        node = node[key]
    return node


def flatten_keys(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Turn nested dictionaries into one whose keys are paths such as "a.b". Empty dictionaries leave nothing behind.

    >>> flatten_keys({"a": {"b": 1, "c": {}}, "d": 2})
    {'a.b': 1, 'd': 2}
    """
    result: dict[str, object] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            result.update(flatten_keys(value, path))
        else:
            result[path] = value
    return result


def most_common(counts: dict[str, int], limit: int) -> list[str]:
    """List the keys with the highest counts, at most limit of them; of equal counts the key first in the alphabet.

    >>> most_common({"b": 2, "a": 2, "c": 5}, 2)
    ['c', 'a']
    """
    order = sorted(counts, key=lambda key: (-counts[key], key))
    return order[:limit]


def diff_keys(old: dict[str, int], new: dict[str, int]) -> tuple[list[str], list[str], list[str]]:
    """Compare two mappings: the keys that were added, removed and changed, each list sorted.

    >>> diff_keys({"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5})
    (['d'], ['a'], ['c'])
    """
    added = sorted(key for key in new if key not in old)
    removed = sorted(key for key in old if key not in new)
    changed = sorted(key for key in old if key in new and old[key] != new[key])
    return added, removed, changed


def merge_nested(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """Lay changes over a base. Where both have a dictionary, these are merged alike; else the change wins.

    Neither of them is changed.

    >>> merge_nested({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 9}, "b": 4})
    {'a': {'x': 1, 'y': 9}, 'b': 4}
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = merge_nested(old, value)
        else:
            result[key] = value
    return result


def sum_by_key(rows: list[tuple[str, int]], least: int) -> dict[str, int]:
    """Sum up the amounts of each name, and keep the names whose sum is at least the given one.

    >>> sum_by_key([("a", 2), ("b", 1), ("a", 3)], 2)
    {'a': 5}
    """
    totals: dict[str, int] = {}
    for name, amount in rows:
        totals[name] = totals.get(name, 0) + amount
    return {name: total for name, total in totals.items() if total >= least}


def rename_keys(mapping: dict[str, int], names: dict[str, str]) -> dict[str, int]:
    """Give a mapping with new names for some keys; keys without a new name keep theirs. The mapping is not changed.

    >>> rename_keys({"a": 1, "b": 2}, {"a": "x"})
    {'x': 1, 'b': 2}
    """
    result = {}
    for key, value in mapping.items():
        result[names.get(key, key)] = value
    return result


def apply_orders(stock: dict[str, int], orders: list[tuple[str, int]]) -> tuple[dict[str, int], list[str]]:
    """Serve orders one after another from the stock: what is left, and the names of the orders refused.

    An order is refused if the stock does not have all of it; a stock that falls to 0 stays listed. The stock given is
    not changed.

    >>> apply_orders({"nail": 5}, [("nail", 3), ("nail", 3), ("nail", 2)])
    ({'nail': 0}, ['nail'])
    """
    left = dict(stock)
    refused = []
    for name, amount in orders:
        if left.get(name, 0) >= amount:
            left[name] -= amount
        else:
            refused.append(name)
    return left, refused


ENTRIES = (
    Entry(invert, lambda rng: ({key: rng.randint(0, 3) for key in words(rng, 6)},)),
    Entry(
        merge_counts,
        lambda rng: ({k: rng.randint(-2, 2) for k in words(rng, 4)}, {k: rng.randint(-2, 2) for k in words(rng, 4)}),
    ),
    Entry(group_by_length, lambda rng: (words(rng, 7, letters="ab"),)),
    Entry(
        deep_get,
        lambda rng: (
            nested(rng),
            ".".join(rng.choice("abcd") for _ in range(rng.randint(1, 3))),
            rng.choice((None, 7)),
        ),
    ),
    Entry(flatten_keys, lambda rng: (nested(rng),)),
    Entry(
        most_common, lambda rng: ({key: rng.randint(0, 3) for key in "dbcae"[: rng.randint(0, 5)]}, rng.randint(0, 5))
    ),
    Entry(
        diff_keys,
        lambda rng: (
            {key: rng.randint(0, 2) for key in rng.sample("abcde", rng.randint(0, 4))},
            {key: rng.randint(0, 2) for key in rng.sample("abcde", rng.randint(0, 4))},
        ),
    ),
    Entry(merge_nested, lambda rng: (nested(rng), nested(rng))),
    Entry(
        sum_by_key, lambda rng: ([(rng.choice("abc"), amount) for amount in ints(rng, -3, 6, 7)], rng.randint(-2, 6))
    ),
    Entry(
        rename_keys,
        lambda rng: (
            {key: rng.randint(0, 9) for key in rng.sample("abcde", rng.randint(0, 4))},
            {key: rng.choice("vwx") + key for key in rng.sample("abcde", rng.randint(0, 4))},
        ),
    ),
    Entry(
        apply_orders,
        lambda rng: (
            {key: rng.randint(0, 6) for key in rng.sample("abc", rng.randint(1, 3))},
            [(rng.choice("abc"), amount) for amount in ints(rng, 1, 4, 6)],
        ),
    ),
)
