"""The order of a finite set of tasks: complete epochs, weights, any position at any time."""

from collections import Counter

import pytest

from sao_core.environments.walk import Walk


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_with_equal_weights_every_epoch_holds_every_item_once(size):
    walk = Walk([0.7] * size, "rows", 3)
    epochs = [[walk[position] for position in range(start, start + size)] for start in (0, size, 2 * size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size == 1000:
        assert epochs[0] != epochs[1]


def test_an_item_comes_as_often_as_its_weight_says():
    walk = Walk([1, 2, 1, 4], "rows", 0)
    assert len(walk) == 4
    for epoch in range(20):
        counts = Counter(walk[4 * epoch + offset] for offset in range(4))
        assert counts[1] == 1
        assert counts[3] == 2
        assert counts[0] + counts[2] == 1
    seen = Counter(walk[position] for position in range(8000))
    assert [seen[item] / 1000 for item in range(4)] == pytest.approx([1, 2, 1, 4], rel=0.05)


def test_positions_can_be_asked_for_in_any_order():
    forward = Walk([1, 3, 2], "rows", 1)
    walk = [forward[position] for position in range(30)]
    backward = Walk([1, 3, 2], "rows", 1)
    assert [backward[position] for position in reversed(range(30))] == walk[::-1]
    assert [Walk([1, 3, 2], "rows", 2)[position] for position in range(30)] != walk
