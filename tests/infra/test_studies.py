"""Studies: the last evaluation of completed runs, with an interval over seeds."""

from __future__ import annotations

import pytest

from flows.study import plan
from infra.ledger import Ledger
from infra.studies import compare
from sao_core.config import ConfigError, TrainConfig


def finished(ledger: Ledger, run_id: str, *rewards: float, status: str = "completed") -> None:
    ledger.create_run(run_id, "tiny", "sao", {"learner": {"updates": 1}})
    for version, reward in enumerate(rewards):
        ledger.add_evaluation(run_id, version, version, "calculator", {"eval/calculator/reward_mean": reward}, "sha")
    ledger.set_status(run_id, status)


def test_a_variant_is_the_mean_of_its_runs_with_students_interval(ledger: Ledger):
    finished(ledger, "a-s0", 0.1, 0.5)
    finished(ledger, "a-s1", 0.1, 0.6)
    finished(ledger, "a-s2", 0.1, 0.7)
    finished(ledger, "a-s3", 0.1, 0.9, status="failed")
    sampled, greedy = compare(ledger, {"a": ["a-s0", "a-s1", "a-s2", "a-s3", "never-started"]})
    assert (sampled.variant, sampled.metric, sampled.runs) == ("a", "reward_mean", 3)
    assert sampled.mean == pytest.approx(0.6)
    # t(0.975, 2) = 4.302653; standard error 0.1 / √3
    assert sampled.half_width == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-5)
    assert sampled.as_dict()["mean ± 95 %"] == "0.600 ± 0.248"
    assert greedy.runs == 0
    assert greedy.as_dict()["mean ± 95 %"] == "–"


def test_one_run_has_no_interval(ledger: Ledger):
    finished(ledger, "a-s0", 0.5)
    sampled, _ = compare(ledger, {"a": ["a-s0"]})
    assert (sampled.mean, sampled.half_width) == (0.5, None)


def test_a_plan_goes_seed_by_seed_and_names_its_runs():
    planned = plan(TrainConfig(), "s", {"sao": [], "vapo": ["algorithm.name=vapo"]}, [0, 7])
    assert list(planned) == ["s-sao-s0", "s-vapo-s0", "s-sao-s7", "s-vapo-s7"]
    assert planned["s-vapo-s7"].algorithm.name == "vapo"
    assert planned["s-vapo-s7"].seed == 7
    assert {config.tracking.study for config in planned.values()} == {"s"}


def test_a_plan_without_anything_to_compare_is_refused():
    with pytest.raises(ConfigError, match="one variant and one seed"):
        plan(TrainConfig(), "s", {}, [0])
    with pytest.raises(ConfigError, match=r"algorithm\.nam"):
        plan(TrainConfig(), "s", {"a": ["algorithm.nam=vapo"]}, [0])
