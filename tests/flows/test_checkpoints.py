"""Checkpoints from the command line: listed, named, exported by name or step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.checkpoints import CheckpointStore
from infra.ledger import Ledger, NewPolicy
from infra.objects import ObjectStore
from infra.settings import Settings
from sao_core.config import TrainConfig

RUN = "tiny-1"


def sao(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 0, 1 and 2, whose files only look like a model."""
    folder = tmp_path_factory.mktemp("home")
    places = Settings.from_environment({}, directory=folder)
    ledger = Ledger(places.database_url)
    ledger.create_run(RUN, "tiny", "sao", TrainConfig().model_dump(mode="json"))
    ledger.begin_attempt(RUN)
    ledger.add_policy(RUN, NewPolicy(0, f"runs/{RUN}/policies/0", "0" * 64), step=0)
    store = CheckpointStore(ObjectStore.from_settings(places), ledger, RUN, places.cache, keep=3)
    for step in (0, 1, 2):
        if step:
            ledger.commit_update(RUN, step, 0, 0, {}, [], {}, None)
        draft = folder / "draft"
        (draft / "policy_engine").mkdir(parents=True)
        (draft / "model.safetensors").write_text(f"weights of step {step}")
        (draft / "policy_engine" / "state.pt").write_text("optimizer")
        store.save(step, draft)
        store.flush()
    store.close()
    return folder


def test_checkpoints_are_listed_newest_first(home: Path):
    listed = json.loads(sao(home, "checkpoints", RUN, "--json").stdout)
    assert [checkpoint["step"] for checkpoint in listed] == [2, 1, 0]
    shown = sao(home, "checkpoints", RUN).stdout
    assert all(f"checkpoints/{step}" in shown for step in (0, 1, 2))


def test_a_checkpoint_is_exported_by_its_name_without_the_optimizers(home: Path):
    assert "step 1 of tiny-1 is kept as best" in sao(home, "keep", RUN, "best", "--step", "1").stdout
    done = sao(home, "export", RUN, "model", "--checkpoint", "best")
    assert done.returncode == 0, done.stderr
    assert (home / "model" / "model.safetensors").read_text() == "weights of step 1"
    assert not (home / "model" / "policy_engine").exists()
    assert "step 1 of tiny-1 is no longer called best" in sao(home, "keep", RUN, "best", "--release").stdout


REFUSED = {
    "no such checkpoint": (["export", RUN, "m", "--checkpoint", "last"], "no checkpoint `last`; there are: 2, 1, 0"),
    "no such step": (["keep", RUN, "best", "--step", "9"], "no checkpoint `9`; there are: 2, 1, 0"),
    "a name that is a step": (["keep", RUN, "7"], "must not be empty or a number"),
    "no such run": (["checkpoints", "tiny-2"], "there is no run tiny-2"),
    "a setting that a resumed run keeps": (["train", "--resume", RUN, "--set", "seed=4"], "keeps its seed: 0 → 4"),
    "a recipe that is another": (["train", "tiny", "--resume", RUN], "learner.batch_size: 128 → 64"),
    "no run to resume": (["train", "--resume", "tiny-2"], "there is no run tiny-2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(home: Path, name: str):
    arguments, expected = REFUSED[name]
    done = sao(home, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert not (home / "m").exists()
