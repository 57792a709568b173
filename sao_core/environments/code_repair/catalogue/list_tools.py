"""Catalogue: functions on lists."""

from __future__ import annotations

from sao_core.environments.code_repair.catalogue.draws import ints, sorted_ints
from sao_core.environments.code_repair.catalogue.entry import Entry


def chunks(items: list[int], size: int) -> list[list[int]]:
    """Cut a list into pieces of size items; the last one may be shorter. Raises ValueError if size is less than 1.

    >>> chunks([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    if size < 1:
        raise ValueError("size must be at least 1")
    result = []
    for start in range(0, len(items), size):
        result.append(items[start : start + size])
    return result


def rotate(items: list[int], steps: int) -> list[int]:
    """Move every item steps places to the right, from the end round to the start; a negative number moves to the left.

    >>> rotate([1, 2, 3, 4], 1)
    [4, 1, 2, 3]
    """
    if not items:
        return []
    steps = steps % len(items)
    cut = len(items) - steps
    return items[cut:] + items[:cut]


def unique(items: list[int]) -> list[int]:
    """Leave out what came before, in the order of the first appearances. The list itself is not changed.

    >>> unique([3, 1, 3, 2, 1])
    [3, 1, 2]
    """
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def flatten(items: list[object]) -> list[object]:
    """Put the items of lists within lists, however deep, into one flat list in the same order.

    >>> flatten([1, [2, [3, []], 4]])
    [1, 2, 3, 4]
    """
    result: list[object] = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


def interleave(first: list[int], second: list[int]) -> list[int]:
    """Take items from both lists in turn, the first list's first; when one is used up, the rest of the other follows.

    >>> interleave([1, 2, 3], [7])
    [1, 7, 2, 3]
    """
    result = []
    shorter = min(len(first), len(second))
    for index in range(shorter):
        result.append(first[index])
        result.append(second[index])
    return result + first[shorter:] + second[shorter:]


def window_sums(items: list[int], size: int) -> list[int]:
    """Sum up every size neighbours. A list with fewer items than size has no sums; size is at least 1.

    >>> window_sums([1, 2, 3, 4], 2)
    [3, 5, 7]
    """
    if len(items) < size:
        return []
    total = sum(items[:size])
    result = [total]
    for index in range(size, len(items)):
        total += items[index] - items[index - size]
        result.append(total)
    return result


def partition(items: list[int], pivot: int) -> tuple[list[int], list[int], list[int]]:
    """Part a list into the items below, equal to and above the pivot; each part keeps the order.

    >>> partition([3, 1, 2, 5, 2], 2)
    ([1], [2, 2], [3, 5])
    """
    below, equal, above = [], [], []
    for item in items:
        if item < pivot:
            below.append(item)
        elif item == pivot:
            equal.append(item)
        else:
            above.append(item)
    return below, equal, above


def second_largest(items: list[int]) -> int | None:
    """Find the largest item that is smaller than the maximum; None if there is none.

    >>> second_largest([4, 9, 9, 7])
    7
    """
    largest = None
    second = None
    for item in items:
        if largest is None or item > largest:
            second = largest
            largest = item
        elif item < largest and (second is None or item > second):
            second = item
    return second


def running_max(items: list[int]) -> list[int]:
    """For each place, the largest item up to and including it.

    >>> running_max([1, 3, 2, 5])
    [1, 3, 3, 5]
    """
    result: list[int] = []
    for item in items:
        if result and result[-1] > item:
            item = result[-1]
        result.append(item)
    return result


def count_pairs(items: list[int], target: int) -> int:
    """Count the pairs of items at different places whose sum is the target; each pair of places counts once.

    >>> count_pairs([1, 3, 2, 2], 4)
    2
    """
    count = 0
    for i in range(len(items)):
        for j in range(i + 1, len(items)):
            if items[i] + items[j] == target:
                count += 1
    return count


def binary_search(items: list[int], target: int) -> int:
    """Find the place of the target in a sorted list without repetitions; -1 if it is not there.

    >>> binary_search([1, 4, 6, 9], 6)
    2
    """
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    """Merge two sorted lists into a sorted one. The lists themselves are not changed.

    >>> merge_sorted([1, 4], [2, 4, 5])
    [1, 2, 4, 4, 5]
    """
    result = []
    i, j = 0, 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            result.append(first[i])
            i += 1
        else:
            result.append(second[j])
            j += 1
    return result + first[i:] + second[j:]


def longest_rise(items: list[int]) -> int:
    """Find the length of the longest stretch of neighbours in which each item is larger than the one before.

    >>> longest_rise([5, 1, 2, 3, 3, 4])
    3
    """
    best = 0
    length = 0
    for index, item in enumerate(items):
        if index > 0 and item > items[index - 1]:
            length += 1
        else:
            length = 1
        best = max(best, length)
    return best


def insert_sorted(items: list[int], value: int) -> list[int]:
    """Give a new list with the value put into a sorted one, before items that are equal. The list is not changed.

    >>> insert_sorted([1, 3, 5], 4)
    [1, 3, 4, 5]
    """
    result = list(items)
    place = 0
    while place < len(result) and result[place] < value:
        place += 1
    result.insert(place, value)
    return result


ENTRIES = (
    Entry(chunks, lambda rng: (ints(rng), rng.randint(0, 5))),
    Entry(rotate, lambda rng: (ints(rng, most=6), rng.randint(-8, 8))),
    Entry(unique, lambda rng: (ints(rng, 0, 5),)),
    Entry(
        flatten, lambda rng: ([rng.choice((1, 2, [], [3], [[4], 5], [6, [7, [8]]])) for _ in range(rng.randint(0, 5))],)
    ),
    Entry(interleave, lambda rng: (ints(rng, most=5), ints(rng, most=5))),
    Entry(window_sums, lambda rng: (ints(rng), rng.randint(1, 5))),
    Entry(partition, lambda rng: (ints(rng, 0, 6), rng.randint(0, 6))),
    Entry(second_largest, lambda rng: (ints(rng, -5, 5, 6),)),
    Entry(running_max, lambda rng: (ints(rng),)),
    Entry(count_pairs, lambda rng: (ints(rng, 0, 5), rng.randint(0, 9))),
    Entry(binary_search, lambda rng: (sorted(set(ints(rng, most=9))), rng.randint(-9, 9))),
    Entry(merge_sorted, lambda rng: (sorted_ints(rng, 0, 9, 5), sorted_ints(rng, 0, 9, 5))),
    Entry(longest_rise, lambda rng: (ints(rng, 0, 6, 9),)),
    Entry(insert_sorted, lambda rng: (sorted_ints(rng, 0, 6, 6), rng.randint(-1, 7))),
)
