"""Micro-batches keep every token's place, and rows carry a rollout across its segments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_fixtures import make_trajectory, random_rollouts

from sao_core.advantages import skip_observation_gae
from sao_core.batching import TrainingBatch, micro_batches, stack_rows

CPU = torch.device("cpu")


def test_rows_hold_every_field_and_mark_padding() -> None:
    first = make_trajectory(0, [5, 6, 7], [False, True, True], 2.0)
    second = make_trajectory(1, [8, 9], [False, True], 0.5)
    rows = stack_rows([(first,), (second,)], CPU)
    assert rows.token_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert rows.action_mask.tolist() == [[False, True, True], [False, True, False]]
    assert rows.behavior_logprobs.tolist() == [[0, -1, -1], [0, -1, 0]]
    assert rows.rewards.tolist() == [[0, 0, 2], [0, 0.5, 0]]
    assert rows.policy_versions.tolist() == [[-1, 1, 1], [-1, 1, -1]]
    assert rows.lengths.tolist() == [3, 2]


@pytest.mark.parametrize("budget", [1, 30, 64, 100_000])
def test_every_token_goes_to_its_place_and_back(budget: int) -> None:
    rollouts = random_rollouts(9)
    rows = stack_rows(rollouts, CPU)
    seen = torch.zeros_like(rows.token_ids)
    for part in micro_batches(rollouts, rows, budget):
        assert torch.equal(part.gather(rows.token_ids), part.token_ids)
        part.scatter(seen, part.token_ids)
    assert torch.equal(seen, rows.token_ids)


def test_padded_tokens_stay_within_the_budget_and_a_longer_sequence_stands_alone() -> None:
    rollouts = random_rollouts(30, longest=40)
    parts = micro_batches(rollouts, stack_rows(rollouts, CPU), 50)
    sizes = [part.token_ids.shape for part in parts]
    assert all(b * t <= 50 or b == 1 for b, t in sizes)
    assert sum(b for b, _ in sizes) == 30
    alone = micro_batches(rollouts, stack_rows(rollouts, CPU), 1)
    assert len(alone) == 30


def test_similar_lengths_share_a_micro_batch() -> None:
    lengths = [4, 30, 5, 29]
    rollouts = [(make_trajectory(i, [9] * n, [False] + [True] * (n - 1), 1.0),) for i, n in enumerate(lengths)]
    parts = micro_batches(rollouts, stack_rows(rollouts, CPU), 60)
    assert [tuple(part.token_ids.shape) for part in parts] == [(2, 5), (2, 30)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_the_work_in_equal_numbers_of_micro_batches(world_size: int) -> None:
    rollouts = random_rollouts(7)
    rows = stack_rows(rollouts, CPU)
    shares = [micro_batches(rollouts, rows, 20, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    seen = torch.zeros_like(rows.token_ids)
    for share in shares:
        for part in share:
            ones = torch.zeros_like(rows.token_ids)
            part.scatter(ones, torch.ones_like(part.token_ids))
            seen += ones
    assert torch.equal(seen, (torch.arange(rows.token_ids.shape[1]) < rows.lengths[:, None]).long())


def test_idle_micro_batch_has_no_action_tokens() -> None:
    rollouts = random_rollouts(1)
    rows = stack_rows(rollouts, CPU)
    (idle,) = micro_batches(rollouts, rows, 1000, rank=1, world_size=2)
    assert idle.idle
    assert idle.token_ids.any()
    assert not idle.gather(rows.action_mask).any()


def _two_segments() -> TrainingBatch:
    first = make_trajectory(0, [5, 6, 7], [False, True, True], 0.0, request_number=0, segment=0, num_segments=2)
    second = make_trajectory(1, [8, 9, 10, 11], [False, False, True, True], 1.0, segment=1, num_segments=2)
    other = make_trajectory(2, [12, 13], [False, True], 0.0)
    return TrainingBatch.of([(first, second), (other,)], 4, CPU)


def test_segments_are_read_apart_and_learned_from_together() -> None:
    batch = _two_segments()
    assert batch.rows.token_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11], [12, 13, 0, 0, 0, 0, 0]]
    assert sorted(row for part in batch.parts for row in part.token_ids.tolist()) == [
        [5, 6, 7],
        [8, 9, 10, 11],
        [12, 13],
    ]
    assert batch.num_action_tokens == 5


def test_return_crosses_from_one_segment_to_the_next() -> None:
    batch = _two_segments()
    _, returns = skip_observation_gae(batch.rows.rewards, batch.blank(), batch.rows.action_mask, 0.5, 1.0)
    assert returns.tolist() == [[0, 0.125, 0.25, 0, 0, 0.5, 1], [0, 0, 0, 0, 0, 0, 0]]


def test_columns_split_by_trajectory() -> None:
    batch = _two_segments()
    column = torch.arange(14.0).view(2, 7)
    split = batch.by_trajectory({"x": column})
    assert {name: columns["x"].tolist() for name, columns in split.items()} == {
        "t0": [0, 1, 2],
        "t1": [3, 4, 5, 6],
        "t2": [7, 8],
    }


def test_last_token_of_each_rollout() -> None:
    batch = _two_segments()
    assert batch.at_end(torch.arange(14.0).view(2, 7)).tolist() == [6, 8]


def test_tokens_out_of_the_losses_stay_in_the_denominator() -> None:
    batch = _two_segments()
    old = torch.zeros_like(batch.trained)
    old[0, 1] = True
    less = batch.without(old)
    assert less.trained.sum() == 4
    assert less.num_action_tokens == 5
    assert np.array_equal(less.rows.action_mask, batch.rows.action_mask)


def test_action_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="t0 starts with an action token"):
        stack_rows([(make_trajectory(0, [5, 6], [True, True], 1.0),)], CPU)
