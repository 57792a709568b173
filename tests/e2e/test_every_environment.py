"""Every environment that comes with the package trains through the same flow, in one run that mixes them all."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from classifier_fixtures import share_classifier
from short_run import Home

from infra.ledger import TrajectoryState
from infra.objects import ObjectStore
from infra.trajectory_store import TrajectoryStore
from sao_core.environments import names
from sao_core.models.policy import load_tokenizer
from sao_core.models.tiny import build_tiny
from sao_core.trajectory import Outcome, Purpose

ELSEWHERE = {"mixture", "external_agent", "verifiers", "openenv"}
"""The mixture itself; what drives rollouts otherwise (test_external_agent_run); `make test-adapters`."""
UPDATES, BATCH = 4, 10
DOCS = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def parts(folder: Path) -> dict[str, Any]:
    """Options with which the tiny model's rollouts of each environment are short."""
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"prompt": f"double {n}", "answer": 2 * n}) for n in range(20)))
    build_tiny(folder / "tiny", seed=0)
    share_classifier(folder / "classifier", load_tokenizer(folder / "tiny"), liked={10, 11})
    return {
        "calculator": {},
        "jsonl": {"options": {"path": str(questions)}},
        "sorting": {},
        "writing": {},
        "reward_model": {"options": {"model": str(folder / "classifier")}},
        "python_math": {"options": {"instructions": False, "easiest": 1, "hardest": 1}},
        "code_repair": {"options": {"levels": ["easy"], "instructions": False, "show_tools": False}},
        "reasoning_gym": {"options": {"dataset": "chain_sum", "instructions": ""}},
        "gymnasium": {"options": {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}},
        "own": {"environment": "backwards:SPEC"},
    }


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with a recipe of everything, and the environment of the docs beside it."""
    folder = tmp_path_factory.mktemp("environments")
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    (folder / "backwards.py").write_text(found.group(1))
    recipe = {
        "environment": {"name": "mixture", "options": {"parts": parts(folder)}},
        "model": {"path": str(folder / "tiny")},
        "policy": {"first_update_step": 1},
        "critic": {"pretrain": {"rollouts": 10, "max_epochs": 1}},
        "rollout": {"slots": 10, "max_turns": 2, "max_action_tokens": 16, "max_context_tokens": 3072},
        "learner": {"updates": UPDATES, "batch_size": BATCH, "checkpoint_every": 2, "record_tokens": "none"},
        "evaluation": {"every": 0, "prompts": 10, "greedy": False},
        "tracking": {"traces": 0},
    }
    (folder / "everything.yaml").write_text(yaml.safe_dump(recipe))
    return Home(folder)


def test_every_environment_trains_in_one_run(mixed: Home) -> None:
    assert set(parts(mixed.folder)) - {"own"} == set(names()) - ELSEWHERE
    done = mixed.sao("train", "everything.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = mixed.ledger()
    (run,) = ledger.runs()
    assert (run.status, run.step) == ("completed", UPDATES)
    rows = ledger.trajectories(run.run_id)
    store = TrajectoryStore(ObjectStore(mixed.settings.object_store))
    stored = [segment for rollout in store.read(rows) for segment in rollout]
    failed = {(t.environment, t.stop_reason) for t in stored if t.outcome is Outcome.FAILED}
    assert not failed
    assert not ledger.lost_rollouts(run.run_id)
    trained = {row.trajectory_id for row in rows if row.state is TrajectoryState.TRAINED}
    assert len(trained) == UPDATES * BATCH
    shares = Counter(t.environment for t in stored if t.purpose is Purpose.TRAIN)
    versions = {t.environment: t.environment_version for t in stored}
    evaluated = Counter(t.environment for t in stored if t.purpose is Purpose.EVALUATE)
    assert set(versions) == set(parts(mixed.folder))
    assert len(shares) >= 9, "four batches of ten draw from nearly every part"
    assert set(evaluated) == set(parts(mixed.folder)), "each part has a held-out prompt"
    assert mixed.sao("verify", run.run_id).returncode == 0
