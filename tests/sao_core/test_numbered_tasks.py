"""Keys of tasks that are made from a number: one order for everybody, and nothing but what was given out."""

import pytest

from sao_core.environments import get

CALCULATOR = get("calculator")


def source(**options):
    return CALCULATOR.tasks(CALCULATOR.parse_options(options), 0)


@pytest.mark.parametrize("key", ["train/", "train/-1", "train/1.0", "train/²", "train/٣", "other/1", "train"])
def test_a_key_that_was_not_given_out_is_refused(key):
    with pytest.raises(KeyError):
        source().task(key)


def test_a_fixed_number_of_tasks_comes_back_in_shuffled_epochs():
    tasks = source(train_tasks=5)
    keys = [tasks.key_at(position) for position in range(10)]
    assert sorted(keys[:5]) == sorted(keys[5:]) == [f"train/{n}" for n in range(5)]
    assert keys[:5] != keys[5:]
    assert (tasks.epoch_size, source().epoch_size) == (5, None)
    assert [source().key_at(position) for position in (0, 7)] == ["train/0", "train/7"]
