"""SWE-bench predictions: what the official harness reads of a file is what the environment left of a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from evaluated_runs import Bench, config

from infra.evaluation_comparison import Evaluated
from infra.predictions import Written, write_predictions
from infra.trajectory_store import CorruptObject
from sao_core.config import ConfigError

PATCH = "diff --git a/sums.py b/sums.py\n--- a/sums.py\n+++ b/sums.py\n@@ -1 +1 @@\n-a - b\n+a + b  # “ä”\n"


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Bench:
    return Bench(tmp_path / "bench", migrated_sqlite)


def answer(key: str, sample: int) -> dict[str, Any]:
    """The second prompt's rollouts are cut before they leave anything; the first ones name their instance."""
    number = int(key.rpartition("/")[2])
    info = {"patch": PATCH.replace("sums", f"sums{sample}")}
    if number == 0:
        info["instance_id"] = "sums__sums-1"
    return {"score": 0.0, "info": {} if number == 1 else info}


def as_the_harness_reads(path: Path) -> dict[str, dict[str, str]]:
    """One JSON object a line, each with its instance, which may come once (swebench.harness.utils)."""
    predictions = [json.loads(line) for line in path.open()]
    assert all({"instance_id", "model_name_or_path", "model_patch"} == prediction.keys() for prediction in predictions)
    assert len({prediction["instance_id"] for prediction in predictions}) == len(predictions)
    return {prediction["instance_id"]: prediction for prediction in predictions}


def evaluated(bench: Bench) -> Evaluated:
    return bench.evaluate("e", answer, config(prompts=3))


def test_every_prompt_is_a_row_with_its_final_patch(bench: Bench, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = tmp_path / "predictions.jsonl"
    written = write_predictions(bench.ledger, bench.store, evaluated(bench), path, say=lambda *at: told.append(at))
    rows = as_the_harness_reads(path)
    assert list(rows) == ["sums__sums-1", "evaluation/1", "evaluation/2"]
    assert rows["sums__sums-1"]["model_patch"] == PATCH.replace("sums", "sums0")
    assert rows["evaluation/1"]["model_patch"] == "", "the harness counts it as unresolved"
    assert written == Written(rows=3, empty=1, missing=0)
    assert told == [(3, 3)]
    (model,) = {row["model_name_or_path"] for row in rows.values()}
    assert model == f"somewhere-{'0' * 12}"


def test_another_sample_can_be_chosen(bench: Bench, tmp_path: Path) -> None:
    done, path = evaluated(bench), tmp_path / "p.jsonl"
    write_predictions(bench.ledger, bench.store, done, path, sample=2)
    assert "sums1.py" in as_the_harness_reads(path)["evaluation/2"]["model_patch"]
    with pytest.raises(ConfigError, match="between 1 and the 2 samples of e: got 3"):
        write_predictions(bench.ledger, bench.store, done, tmp_path / "q.jsonl", sample=3)


def test_answers_without_patches_are_refused_and_leave_no_file(bench: Bench, tmp_path: Path) -> None:
    done = bench.evaluate("sums", lambda key, sample: 1.0)
    with pytest.raises(ConfigError, match=r"no answer of sums has a patch: `calculator` leaves none"):
        write_predictions(bench.ledger, bench.store, done, tmp_path / "p.jsonl")
    assert not list(tmp_path.glob("*p.jsonl*"))


def test_an_answer_that_cannot_be_read_leaves_no_file(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> NoReturn:
        raise CorruptObject("damaged")

    done = evaluated(bench)
    monkeypatch.setattr(bench.store, "read", damaged)
    with pytest.raises(CorruptObject):
        write_predictions(bench.ledger, bench.store, done, tmp_path / "p.jsonl")
    assert not list(tmp_path.glob("*p.jsonl*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("p.txt", "must end in .jsonl"), ("there.jsonl", "exists: remove it"), ("no/p.jsonl", "there is no folder")],
    ids=["another ending", "a file that is there", "a folder that is not"],
)
def test_a_place_that_will_not_do_is_refused(bench: Bench, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(ConfigError, match=message):
        write_predictions(bench.ledger, bench.store, evaluated(bench), tmp_path / name)
