"""Each stage is a flow of its own, beside being a part of the training run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from short_run import SHORT, Home

from flows.recipes import load_config
from infra.ledger import Ledger, RunRecord, RunStatus


def run_stage(home: Home, place: str, *settings: str) -> tuple[Ledger, RunRecord]:
    name = place.partition(":")[2]
    config = home.folder / f"{name}.json"
    config.write_text(load_config("tiny", (*SHORT, "tracking.enabled=false", *settings)).model_dump_json())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SAO_", "PREFECT_", "MLFLOW_", "AWS_"))}
    script = Path(__file__).with_name("stage_flow.py")
    done = subprocess.run(
        [sys.executable, str(script), place, name, str(config)],
        cwd=home.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["COMPLETED"], done.stdout[-2000:] + done.stderr[-3000:]
    ledger = Ledger(home.settings.database_url)
    run = ledger.run(name)
    assert run.status is RunStatus.COMPLETED
    return ledger, run


@pytest.fixture(scope="module")
def model(home: Home, finished) -> str:
    done = home.sao("export", finished["run_id"], "for-stages")
    assert done.returncode == 0, done.stderr
    return f"model.path={home.folder / 'for-stages'}"


@pytest.mark.long
def test_warm_start_alone_publishes_and_evaluates_a_policy(home: Home, model: str, tmp_path: Path):
    """A user's JSONL of `messages` takes the demonstrator's place."""
    rows = tmp_path / "rows.jsonl"
    row = '{"messages": [{"role": "user", "content": "1 plus 1"}, {"role": "assistant", "content": "answer: 2"}]}\n'
    rows.write_text(row * 32)
    ledger, run = run_stage(home, "flows.warm_start:warm_start", model, f"warm_start.path={rows}")
    assert ledger.stage_metrics(run.run_id)["prepare"]["warm_start/steps"] == 2
    assert [e.step for e in ledger.evaluations(run.run_id)] == [0]


@pytest.mark.long
def test_value_pretraining_alone_keeps_a_critic_as_checkpoint_0(home: Home, model: str):
    ledger, run = run_stage(home, "flows.pretrain_value:pretrain_value_model", model, "warm_start.enabled=false")
    assert ledger.stage_metrics(run.run_id)["value_pretraining"]["value_pretrain/rollouts"] > 0
    checkpoint = ledger.latest_checkpoint(run.run_id)
    assert checkpoint is not None
    assert checkpoint.step == 0


@pytest.mark.long
def test_evaluation_alone_takes_the_model_as_it_is(home: Home, model: str):
    ledger, run = run_stage(home, "flows.evaluate:evaluate", model)
    assert ledger.stage_metrics(run.run_id) == {}, "there is no learner"
    assert ledger.latest_checkpoint(run.run_id) is None
    (evaluation,) = ledger.evaluations(run.run_id)
    assert 0 <= evaluation.metrics["eval/calculator/reward_mean"] <= 1
    assert evaluation.settings["target"] == model.removeprefix("model.path=")
