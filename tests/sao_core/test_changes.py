"""What a resume may change, and what it refuses."""

from __future__ import annotations

import pytest

from sao_core.changes import CHANGEABLE, changes
from sao_core.config import ConfigError, TrainConfig, parse_config, setting_names


def test_every_changeable_setting_exists():
    assert set(setting_names(TrainConfig)) >= CHANGEABLE


def test_pace_and_learning_rates_may_change_and_are_told_old_to_new():
    new = parse_config({"policy": {"lr": 3e-5}, "learner": {"updates": 20}, "rollout": {"workers": 3}})
    told = [str(change) for change in changes(TrainConfig(), new)]
    assert told == ["learner.updates: 1000 → 20", "policy.lr: 1e-06 → 3e-05", "rollout.workers: 1 → 3"]


def test_what_would_make_it_another_run_is_refused_with_every_differing_key():
    new = parse_config(
        {
            "seed": 3,
            "policy": {"lr": 1e-4},
            "environment": {"options": {"max_difficulty": 2}},
            "algorithm": {"eps_low": 0.5},
        }
    )
    with pytest.raises(ConfigError) as refused:
        changes(TrainConfig(), new)
    message = str(refused.value)
    for part in ("seed: 0 → 3", "algorithm.eps_low: 0.3 → 0.5", "environment.options"):
        assert part in message
    assert "policy.lr" not in message


def test_the_same_configuration_changes_nothing():
    assert changes(TrainConfig(), TrainConfig()) == []
