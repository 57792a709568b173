"""The learner process's verbs, with in-memory ports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_trajectory import trajectory

from sao_core.config import parse_config
from sao_core.environments import base as environments
from sao_core.protocols import Batch
from sao_core.training import LogprobMismatch, Stopped, Training


class Batches:
    """Holds one batch, or none."""

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch

    def claim(self, step: int) -> Batch | None:
        return self.batch


class LearnerWithGap:
    """A learner that computes other log-probabilities than the engine recorded."""

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def logprob_gap(self, rollouts) -> float:
        return self.gap


def training(batch: Batch | None, tmp_path: Path, stopping: bool = False) -> Training:
    config = parse_config({"environment": {"name": "calculator"}})
    return Training(
        config, environments.get("calculator"), Batches(batch), None, tmp_path, print, lambda: stopping, (1, 1)
    )


def on_policy_batch() -> Batch:
    versions = np.array([-1, 0, 0, -1, 0], np.int32)
    return Batch(1, ((trajectory(policy_versions=versions),),))


@pytest.mark.parametrize("gap", [2e-3, float("nan")])
def test_disagreeing_logprobs_stop_the_run_with_the_numbers(gap, tmp_path):
    """An engine that returns raw and a trainer that uses scaled log-probabilities would train on noise."""
    run = training(on_policy_batch(), tmp_path)
    run.learner = LearnerWithGap(gap)
    with pytest.raises(LogprobMismatch, match=r"differ by .* over learner\.logprob_tolerance=0\.001"):
        run.update_value(1)


def test_a_learner_that_waits_for_rollouts_stops_when_asked(tmp_path):
    with pytest.raises(Stopped):
        training(None, tmp_path, stopping=True).update_value(1)


def test_a_policy_update_needs_its_batch(tmp_path):
    with pytest.raises(RuntimeError, match=r"update_policy\(1\) needs update_value\(1\) first"):
        training(None, tmp_path).update_policy(1)
