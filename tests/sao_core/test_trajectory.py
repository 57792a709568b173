from dataclasses import replace

import numpy as np
import pytest

from sao_core.trajectory import InvalidTrajectory, Outcome, Purpose, Role, Trajectory, Turn, validate_rollout


def trajectory(**changes) -> Trajectory:
    """Prompt, two action tokens, an observation, one action token; score 1 on the last action token."""
    values = {
        "trajectory_id": "t0",
        "run_id": "run",
        "request_number": 0,
        "attempt": 1,
        "purpose": Purpose.TRAIN,
        "prompt_key": "p0",
        "token_ids": np.array([5, 6, 7, 8, 9], np.int32),
        "action_mask": np.array([0, 1, 1, 0, 1], bool),
        "behavior_logprobs": np.array([0, -0.5, -0.1, 0, -2.0], np.float32),
        "policy_versions": np.array([-1, 0, 0, -1, 1], np.int32),
        "rewards": np.array([0, 0, 0, 0, 1], np.float32),
        "score": 1.0,
        "outcome": Outcome.COMPLETED,
        "stop_reason": "answered",
        "turns": (Turn(Role.USER, 0, 1), Turn(Role.ASSISTANT, 1, 3), Turn(Role.TOOL, 3, 4), Turn(Role.ASSISTANT, 4, 5)),
    }
    return Trajectory(**(values | changes))


def test_a_sound_trajectory_passes_and_counts():
    record = trajectory()
    record.validate()
    assert (record.num_tokens, record.num_action_tokens, record.num_turns) == (5, 3, 2)
    assert (record.version_min, record.version_max) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rewards": np.zeros(4, np.float32)}, "rewards must have length 5"),
        ({"token_ids": np.arange(5)}, "token_ids must be int32: got int64"),
        ({"action_mask": np.zeros(5, bool)}, "at least one action token"),
        ({"behavior_logprobs": np.array([0, np.nan, 0, 0, 0], np.float32)}, "must be finite"),
        ({"behavior_logprobs": np.array([0, 0.1, 0, 0, 0], np.float32)}, "must be ≤ 0"),
        ({"policy_versions": np.array([-1, 1, 1, -1, 0], np.int32)}, "must not decrease"),
        ({"policy_versions": np.array([-1, -1, 1, -1, 1], np.int32)}, "needs a policy version"),
        ({"rewards": np.array([0, 0, 0, 1, 0], np.float32)}, "rewards belong on action tokens"),
        ({"score": 0.5}, "placed rewards must sum to the score 0.5: got 1"),
    ],
)
def test_the_first_broken_rule_is_named(changes, rule):
    with pytest.raises(InvalidTrajectory, match=rule):
        trajectory(**changes).validate()


def test_segments_of_a_rollout_share_one_score():
    first = trajectory(segment=0, num_segments=2, rewards=np.zeros(5, np.float32))
    second = replace(first, trajectory_id="t1", segment=1, rewards=np.array([0, 0, 0, 0, 1], np.float32))
    validate_rollout([first, second])
    with pytest.raises(InvalidTrajectory, match="sum to the score"):
        validate_rollout([first, replace(second, rewards=np.zeros(5, np.float32))])


def test_a_missing_segment_is_refused():
    first = trajectory(segment=0, num_segments=2)
    with pytest.raises(InvalidTrajectory, match="segments 0…1 are needed in order: got \\[0\\]"):
        validate_rollout([first])
