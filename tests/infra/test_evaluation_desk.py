"""What an evaluation asks for, and what stands on its record."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluated_runs import Bench, config

from infra.manifest import file_sha256
from sao_core.config import parse_config
from sao_core.trajectory import Sampling


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Bench:
    return Bench(tmp_path / "bench", migrated_sqlite)


def test_every_sample_is_asked_with_the_suite_s_sampling(bench: Bench) -> None:
    bench.ask("e", config(temperature=0.6, top_p=0.95, top_k=20, greedy=True))
    asked = [(request.prompt_key, request.sampling) for request in bench.lease("e")]
    sampled = Sampling(temperature=0.6, top_p=0.95, top_k=20)
    keys = [f"evaluation/{index}" for index in range(4)]
    assert asked == [(key, s) for s in (sampled, sampled, Sampling(greedy=True)) for key in keys]


def test_two_models_are_asked_the_same_under_the_same_numbers_which_seed_the_sampling(bench: Bench) -> None:
    for run in ("a", "b"):
        bench.ask(run, config())
    a, b = ([(r.number, r.attempt, r.prompt_key) for r in bench.lease(run)] for run in ("a", "b"))
    assert a == b
    assert len(set(a)) == 8


def test_the_record_states_tasks_sampling_weights_and_code(bench: Bench) -> None:
    asked = config(temperature=0.7, top_p=0.9, suite="my sums", prompts=3)
    record = bench.evaluate("e", lambda key, sample: 1.0, asked, version="9").record
    assert record.suite == "my sums"
    assert record.policy_sha256 == f"{0:064d}"
    settings = dict(record.settings)
    code, limits = settings.pop("code"), settings.pop("limits")
    assert settings == {
        "suite": "my sums",
        "environment": "calculator",
        "environment_options": {},
        "environment_version": "9",
        "files": {},
        "seed": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "greedy": False,
        "prompts": 3,
        "samples_per_prompt": 2,
        "dtype": "float32",
        "target": "somewhere",
        "policy_sha256": f"{0:064d}",
    }
    assert code["version"]
    assert limits["max_turns"] == asked.rollout.max_turns
    assert record.metrics["eval/my sums/rollout_s"] == 2.0


def test_an_evaluation_while_training_names_its_run_and_step(bench: Bench) -> None:
    assert bench.evaluate("t", lambda key, sample: 1.0, config(alone=False)).record.settings["target"] == "t@0"


def test_rollouts_that_never_came_are_counted(bench: Bench) -> None:
    def answer(key: str, sample: int) -> float | None:
        return None if (key, sample) == ("evaluation/1", 1) else 1.0

    record = bench.evaluate("e", answer).record
    assert record.metrics["eval/calculator/missing_rollouts"] == 1.0
    assert record.metrics["eval/calculator/reward_mean"] == 1.0
    assert "eval/calculator/avg_at_2" not in record.metrics, "a prompt has one sample only"


def test_a_file_of_questions_is_known_by_its_bytes(bench: Bench, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    values = config(prompts=5).model_dump(mode="json")
    options = {"path": str(rows), "evaluation_path": str(rows)}
    asked = parse_config({**values, "environment": {"name": "jsonl", "options": options}})
    settings = bench.evaluate("e", lambda key, sample: 1.0, asked).record.settings
    assert settings["files"] == dict.fromkeys(("path", "evaluation_path"), file_sha256(rows))
    assert settings["prompts"] == 1, "as many as there are, whatever was asked for"
