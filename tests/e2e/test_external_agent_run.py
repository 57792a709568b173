"""A program that knows only an OpenAI base URL trains through the whole flow, a process per rollout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
from short_run import Home

from infra.ledger import RunStatus, TrajectoryState
from infra.objects import ObjectStore
from infra.trajectory_store import TrajectoryStore
from sao_core.environments.external import ExternalAgentOptions, ExternalTasks
from sao_core.trajectory import Outcome

SCAFFOLD = Path(__file__).parents[1] / "data" / "agent_scaffold.py"
UPDATES, BATCH = 2, 4
SETTINGS = {
    "environment.name": "external_agent",
    "environment.options.command": "python agent.py",
    "environment.options.tasks": "tasks.jsonl",
    "learner.updates": UPDATES,
    "learner.batch_size": BATCH,
    "rollout.slots": 2,
    "rollout.max_attempts": 2,
    "rollout.max_action_tokens": 60,
    "rollout.max_context_tokens": 768,
    "policy.first_update_step": 1,
    "critic.pretrain.rollouts": 2,
    "critic.pretrain.max_epochs": 1,
    "warm_start.enabled": "false",
    "evaluation.every": 0,
    "evaluation.prompts": 1,
    "tracking.enabled": "false",
}


@pytest.mark.long
def test_an_agent_that_imports_nothing_of_ours_trains_through_the_whole_flow(tmp_path: Path) -> None:
    shutil.copy(SCAFFOLD, tmp_path / "agent.py")
    rows = [{"question": f"compute {n} plus 2", "answer": str(n + 2), "max_tokens": 10} for n in range(8)]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(map(json.dumps, rows)))
    broken = ExternalTasks(ExternalAgentOptions(command=("agent",), tasks=str(tasks)), seed=0).key_at(3)
    del rows[int(broken.removeprefix("row/"))]["answer"]  # the agent crashes once it has asked
    tasks.write_text("\n".join(map(json.dumps, rows)))

    home = Home(tmp_path)
    sets = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    done = home.sao("train", "tiny", *sets, timeout_s=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    ledger = home.ledger()
    (run,) = ledger.runs(1)
    assert (run.status, run.step) == (RunStatus.COMPLETED, UPDATES)
    stored = ledger.trajectories(run.run_id)
    trained = [row for row in stored if row.state is TrajectoryState.TRAINED]
    assert sorted(row.trained_step or 0 for row in trained) == [1] * BATCH + [2] * BATCH
    store = TrajectoryStore(ObjectStore(home.settings.object_store))
    for (trajectory,) in store.read(trained):
        assert trajectory.environment == "external_agent"
        assert [str(message.role) for message in trajectory.messages][:2] == ["user", "assistant"]
        assert trajectory.reward_parts["turns"] == sum(turn.role == "assistant" for turn in trajectory.turns)
    failed = [row for row in stored if row.outcome is Outcome.FAILED]
    assert failed
    for (trajectory,) in store.read(failed):
        assert trajectory.prompt_key == broken
        assert "the program ended with exit code 1" in trajectory.stop_reason
        assert "KeyError: 'answer'" in trajectory.stop_reason
    agents = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    assert not [words for words in agents if str(tmp_path / "agent.py") in (words or ())]
