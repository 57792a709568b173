"""Catalogue: functions on graphs. A graph is a mapping of each node to the nodes that its edges lead to."""

from __future__ import annotations

from collections import deque

from sao_core.environments.code_repair.catalogue.draws import graph, undirected
from sao_core.environments.code_repair.catalogue.entry import Entry


def distances(graph: dict[str, list[str]], start: str) -> dict[str, int]:
    """Give the fewest edges from the start to each node that can be reached, the start itself included.

    >>> distances({"a": ["b"], "b": ["c"], "c": [], "d": ["a"]}, "a")
    {'a': 0, 'b': 1, 'c': 2}
    """
    found = {start: 0}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in graph[node]:
            if other not in found:
                found[other] = found[node] + 1
                queue.append(other)
    return found


def has_path(graph: dict[str, list[str]], start: str, end: str) -> bool:
    """Say whether the end can be reached from the start; each node can be reached from itself.

    >>> has_path({"a": ["b"], "b": [], "c": ["a"]}, "a", "c")
    False
    """
    seen = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node == end:
            return True
        if node in seen:
            continue
        seen.add(node)
        waiting.extend(graph[node])
    return False


def reverse_edges(graph: dict[str, list[str]]) -> dict[str, list[str]]:
    """Give the graph with all edges turned round; the nodes that an edge leads to are sorted.

    >>> reverse_edges({"a": ["b"], "b": [], "c": ["b"]})
    {'a': [], 'b': ['a', 'c'], 'c': []}
    """
    result: dict[str, list[str]] = {node: [] for node in graph}
    for node in sorted(graph):
        for other in graph[node]:
            result[other].append(node)
    return result


def sources(graph: dict[str, list[str]]) -> list[str]:
    """List the nodes that no edge leads to, sorted.

    >>> sources({"a": ["b"], "b": [], "c": ["b"]})
    ['a', 'c']
    """
    incoming = reverse_edges(graph)
    return sorted(node for node in graph if not incoming[node])


def topological_order(graph: dict[str, list[str]]) -> list[str]:
    """List the nodes so that each edge leads to a later one; of several that may come next, the first in the alphabet.

    Raises ValueError if the graph has a cycle.

    >>> topological_order({"a": ["c"], "b": ["c"], "c": []})
    ['a', 'b', 'c']
    """
    degree = dict.fromkeys(graph, 0)
    for node in graph:
        for other in graph[node]:
            degree[other] += 1
    order: list[str] = []
    while len(order) < len(graph):
        ready = sorted(node for node in graph if degree[node] == 0 and node not in order)
        if not ready:
            raise ValueError("the graph has a cycle")
        order.append(ready[0])
        for other in graph[ready[0]]:
            degree[other] -= 1
    return order


def components(graph: dict[str, list[str]]) -> list[list[str]]:
    """List the connected parts of an undirected graph, each sorted, by their first nodes.

    >>> components({"a": ["c"], "b": [], "c": ["a"]})
    [['a', 'c'], ['b']]
    """
    seen: set[str] = set()
    result = []
    for start in sorted(graph):
        if start in seen:
            continue
        part = sorted(distances(graph, start))
        seen.update(part)
        result.append(part)
    return result


def has_cycle(graph: dict[str, list[str]]) -> bool:
    """Say whether a directed graph has a cycle.

    >>> has_cycle({"a": ["b"], "b": ["a"]})
    True
    """
    left = dict(graph)
    while left:
        removable = [node for node in left if not any(other in left for other in left[node])]
        if not removable:
            return True
        for node in removable:
            del left[node]
    return False


def is_bipartite(graph: dict[str, list[str]]) -> bool:
    """Say whether the nodes of an undirected graph can be given two colours so that no edge joins equal ones.

    >>> is_bipartite({"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]})
    False
    """
    colour: dict[str, int] = {}
    for start in graph:
        if start in colour:
            continue
        colour[start] = 0
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for other in graph[node]:
                if other not in colour:
                    colour[other] = 1 - colour[node]
                    queue.append(other)
                elif colour[other] == colour[node]:
                    return False
    return True


def shortest_path(graph: dict[str, list[str]], start: str, end: str) -> list[str]:
    """Give the nodes of a path with the fewest edges, both ends included; [] if there is none.

    Edges are tried in the order in which they are listed.

    >>> shortest_path({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, "a", "d")
    ['a', 'b', 'd']
    """
    before: dict[str, str | None] = {start: None}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if node == end:
            break
        for other in graph[node]:
            if other not in before:
                before[other] = node
                queue.append(other)
    if end not in before:
        return []
    path = []
    step: str | None = end
    while step is not None:
        path.append(step)
        step = before[step]
    return path[::-1]


def cheapest(costs: dict[str, dict[str, int]], start: str) -> dict[str, int]:
    """Give the least total cost from the start to each node that can be reached; costs are at least 0.

    >>> cheapest({"a": {"b": 5, "c": 1}, "b": {}, "c": {"b": 2}}, "a")
    {'a': 0, 'b': 3, 'c': 1}
    """
    best = {start: 0}
    done: set[str] = set()
    while len(done) < len(best):
        node = min((other for other in best if other not in done), key=lambda other: (best[other], other))
        done.add(node)
        for other, cost in costs[node].items():
            total = best[node] + cost
            if other not in best or total < best[other]:
                best[other] = total
    return best


def two_way(graph: dict[str, list[str]]) -> list[tuple[str, str]]:
    """List the pairs of nodes with edges both ways, each once with its first node first, sorted.

    >>> two_way({"a": ["b", "c"], "b": ["a"], "c": []})
    [('a', 'b')]
    """
    pairs = []
    for node in sorted(graph):
        for other in sorted(graph[node]):
            if node < other and node in graph[other]:
                pairs.append((node, other))
    return pairs


ENTRIES = (
    Entry(distances, lambda rng: (graph(rng), "a")),
    Entry(has_path, lambda rng: (lambda g: (g, rng.choice(list(g)), rng.choice(list(g))))(graph(rng))),
    Entry(reverse_edges, lambda rng: (graph(rng),)),
    Entry(sources, lambda rng: (graph(rng),), (reverse_edges,)),
    Entry(topological_order, lambda rng: (graph(rng, density=0.15),)),
    Entry(components, lambda rng: (undirected(rng, density=0.25),), (distances,)),
    Entry(has_cycle, lambda rng: (graph(rng, density=0.2),)),
    Entry(is_bipartite, lambda rng: (undirected(rng),)),
    Entry(shortest_path, lambda rng: (lambda g: (g, rng.choice(list(g)), rng.choice(list(g))))(graph(rng))),
    Entry(
        cheapest,
        lambda rng: (
            {node: {other: rng.randint(0, 6) for other in others} for node, others in graph(rng, density=0.45).items()},
            "a",
        ),
    ),
    Entry(two_way, lambda rng: (graph(rng, density=0.5),)),
)
