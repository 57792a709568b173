"""Catalogue: functions on intervals."""

from __future__ import annotations

import random

from sao_core.environments.code_repair.catalogue.draws import intervals
from sao_core.environments.code_repair.catalogue.entry import Entry


def overlaps(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Say whether two intervals (start, end) share more than an end point.

    >>> overlaps((1, 4), (3, 6))
    True
    >>> overlaps((1, 3), (3, 6))
    False
    """
    return first[0] < second[1] and second[0] < first[1]


def intersection(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int] | None:
    """Give the interval that two intervals have in common; None if they share no more than an end point.

    >>> intersection((1, 4), (3, 6))
    (3, 4)
    """
    start = max(first[0], second[0])
    end = min(first[1], second[1])
    if start >= end:
        return None
    return start, end


def merge_intervals(items: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that overlap or touch, and sort them. The list given is not changed.

    >>> merge_intervals([(5, 7), (1, 3), (3, 4)])
    [(1, 4), (5, 7)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted(items):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered_length(items: list[tuple[int, int]]) -> int:
    """Measure what the intervals cover together; what is covered twice counts once.

    >>> covered_length([(1, 4), (3, 6), (8, 9)])
    6
    """
    total = 0
    for start, end in merge_intervals(items):
        total += end - start
    return total


def gaps(items: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """List the parts of the range from start to end that no interval covers.

    >>> gaps([(2, 3), (5, 6)], 0, 8)
    [(0, 2), (3, 5), (6, 8)]
    """
    free = []
    position = start
    for left, right in merge_intervals(items):
        if left > position and position < end:
            free.append((position, min(left, end)))
        position = max(position, right)
    if position < end:
        free.append((position, end))
    return free


def most_at_once(items: list[tuple[int, int]]) -> int:
    """Find how many intervals overlap at most at one time; one that ends where another starts does not count there.

    >>> most_at_once([(1, 5), (2, 6), (5, 8)])
    2
    """
    events = []
    for start, end in items:
        events.append((start, 1))
        events.append((end, -1))
    most = 0
    running = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most


def subtract(whole: tuple[int, int], hole: tuple[int, int]) -> list[tuple[int, int]]:
    """Cut a hole out of an interval and list what is left, without empty parts.

    >>> subtract((1, 9), (3, 5))
    [(1, 3), (5, 9)]
    """
    left = []
    if hole[0] > whole[0]:
        left.append((whole[0], min(hole[0], whole[1])))
    if hole[1] < whole[1]:
        left.append((max(hole[1], whole[0]), whole[1]))
    return left


def find_slot(busy: list[tuple[int, int]], length: int, end: int) -> int | None:
    """Find the earliest time ≥ 0 from which a slot of the given length is free and over by the end; None if none is.

    >>> find_slot([(0, 2), (3, 6)], 2, 9)
    6
    """
    position = 0
    for start, stop in merge_intervals(busy):
        if start - position >= length:
            break
        position = max(position, stop)
    if position + length > end:
        return None
    return position


def count_containing(items: list[tuple[int, int]], point: int) -> int:
    """Count the intervals that a point lies in; the start belongs to an interval, the end does not.

    >>> count_containing([(1, 3), (3, 5), (2, 4)], 3)
    2
    """
    count = 0
    for start, end in items:
        if start <= point < end:
            count += 1
    return count


def _one(rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, 8)
    return start, start + rng.randint(1, 6)


ENTRIES = (
    Entry(overlaps, lambda rng: (_one(rng), _one(rng))),
    Entry(intersection, lambda rng: (_one(rng), _one(rng))),
    Entry(merge_intervals, lambda rng: (intervals(rng),)),
    Entry(covered_length, lambda rng: (intervals(rng),), (merge_intervals,)),
    Entry(gaps, lambda rng: (intervals(rng, 4), rng.randint(0, 6), rng.randint(8, 22)), (merge_intervals,)),
    Entry(most_at_once, lambda rng: (intervals(rng),)),
    Entry(subtract, lambda rng: (_one(rng), _one(rng))),
    Entry(find_slot, lambda rng: (intervals(rng, 4), rng.randint(1, 6), rng.randint(6, 24)), (merge_intervals,)),
    Entry(count_containing, lambda rng: (intervals(rng, 7), rng.randint(0, 20))),
)
