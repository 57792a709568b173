"""Catalogue: functions that describe samples."""

from __future__ import annotations

from sao_core.environments.code_repair.catalogue.draws import ints
from sao_core.environments.code_repair.catalogue.entry import Entry


def mean(values: list[int]) -> float:
    """Give the mean of a sample. Raises ValueError for an empty one.

    >>> mean([1, 2, 6])
    3.0
    """
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)


def median(values: list[int]) -> float:
    """Give the middle value of a sample, or the mean of the two middle ones. The sample is not changed.

    Raises ValueError for an empty one.

    >>> median([5, 1, 3])
    3
    >>> median([4, 1, 3, 2])
    2.5
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def modes(values: list[int]) -> list[int]:
    """List the values that come most often, in ascending order.

    >>> modes([3, 1, 3, 1, 2])
    [1, 3]
    """
    counts: dict[int, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    most = max(counts.values(), default=0)
    return sorted(value for value, count in counts.items() if count == most)


def variance(values: list[int]) -> float:
    """Give the mean squared distance from the mean (of all values, not of all but one). Raises ValueError if empty.

    >>> variance([2, 4, 6, 8])
    5.0
    """
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)


def histogram(values: list[int], width: int) -> dict[int, int]:
    """Count the values in bins of the given width; a bin is named by its lower end, a multiple of the width.

    Bins without values are left out.

    >>> histogram([1, 4, 5, 12], 5)
    {0: 2, 5: 1, 10: 1}
    """
    bins: dict[int, int] = {}
    for value in values:
        start = value // width * width
        bins[start] = bins.get(start, 0) + 1
    return bins


def percentile(values: list[int], percent: int) -> int:
    """Give the smallest value that at least percent per cent of the sample do not exceed (nearest rank).

    percent is from 0 to 100; 0 gives the smallest value. Raises ValueError for an empty sample.

    >>> percentile([15, 20, 35, 40, 50], 40)
    20
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (percent * len(ordered) + 99) // 100
    return ordered[max(rank, 1) - 1]


def shares(counts: dict[str, int]) -> dict[str, int]:
    """Give each count's share of the total in whole per cent, rounded down; all 0 if the total is 0.

    >>> shares({"yes": 2, "no": 1})
    {'yes': 66, 'no': 33}
    """
    total = sum(counts.values())
    if total == 0:
        return dict.fromkeys(counts, 0)
    return {name: count * 100 // total for name, count in counts.items()}


def ranks(values: list[int]) -> list[int]:
    """Give each value's rank: 1 plus the number of larger values, so that equal ones share a rank.

    >>> ranks([10, 30, 30, 20])
    [4, 1, 1, 3]
    """
    result = []
    for value in values:
        rank = 1
        for other in values:
            if other > value:
                rank += 1
        result.append(rank)
    return result


def trimmed_mean(values: list[int], cut: int) -> float:
    """Give the mean without the cut smallest and the cut largest values. Raises ValueError if none would be left.

    >>> trimmed_mean([1, 2, 3, 100], 1)
    2.5
    """
    if len(values) <= 2 * cut:
        raise ValueError("nothing would be left")
    kept = sorted(values)[cut : len(values) - cut]
    return mean(kept)


def outliers(values: list[int], distance: int) -> list[int]:
    """List the values that are more than the given distance away from the median, in their order.

    A sample without values has none.

    >>> outliers([4, 5, 6, 19, 5], 3)
    [19]
    """
    if not values:
        return []
    center = median(values)
    return [value for value in values if abs(value - center) > distance]


ENTRIES = (
    Entry(mean, lambda rng: (ints(rng, most=6),)),
    Entry(median, lambda rng: (ints(rng, most=7),)),
    Entry(modes, lambda rng: (ints(rng, 0, 4, 7),)),
    Entry(variance, lambda rng: (ints(rng, most=5),), (mean,)),
    Entry(histogram, lambda rng: (ints(rng, -6, 20, 8), rng.randint(1, 6))),
    Entry(percentile, lambda rng: (ints(rng, 0, 30, 7), rng.choice((0, 10, 25, 40, 50, 75, 90, 100)))),
    Entry(shares, lambda rng: ({key: rng.choice((0, 0, 1, 2, 5)) for key in "abcd"[: rng.randint(0, 4)]},)),
    Entry(ranks, lambda rng: (ints(rng, 0, 6, 6),)),
    Entry(trimmed_mean, lambda rng: (ints(rng, most=7), rng.randint(0, 3)), (mean,)),
    Entry(outliers, lambda rng: (ints(rng, -5, 12, 7), rng.randint(1, 5)), (median,)),
)
