"""Both adapters train for a few updates through the same flow as everything else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import yaml
from short_run import Home

from infra.ledger import TrajectoryState
from infra.objects import ObjectStore
from infra.trajectory_store import TrajectoryStore
from sao_core.trajectory import Outcome

UPDATES, BATCH = 3, 8


def test_tasksets_and_servers_train(verifiers_python: str, openenv_url: str, tmp_path: Path) -> None:
    recipe = {
        "environment": {
            "name": "mixture",
            "options": {
                "parts": {
                    "verifiers": {"options": {"taskset": "riddles", "python": verifiers_python}},
                    "openenv": {"options": {"url": openenv_url, "observation_field": "text"}},
                }
            },
        },
        "policy": {"first_update_step": 1},
        "critic": {"pretrain": {"rollouts": 8, "max_epochs": 1}},
        "rollout": {"slots": 4, "max_turns": 2, "max_action_tokens": 16, "max_context_tokens": 256},
        "learner": {"updates": UPDATES, "batch_size": BATCH, "record_tokens": "none"},
        "evaluation": {"every": 0, "prompts": 4, "greedy": False},
        "tracking": {"traces": 0},
    }
    (tmp_path / "adapters.yaml").write_text(yaml.safe_dump(recipe))
    home = Home(tmp_path, {"PYTHONPATH": str(Path(__file__).parent)})
    done = home.sao("train", "adapters.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = home.ledger()
    (run,) = ledger.runs()
    assert (run.status, run.step) == ("completed", UPDATES)
    rows = ledger.trajectories(run.run_id)
    assert sum(row.state is TrajectoryState.TRAINED and row.segment == 0 for row in rows) == UPDATES * BATCH
    stored = [t for rollout in TrajectoryStore(ObjectStore(home.settings.object_store)).read(rows) for t in rollout]
    assert not {t.stop_reason for t in stored if t.outcome is Outcome.FAILED}
    assert set(Counter(t.environment for t in stored)) == {"verifiers", "openenv"}
