"""Ctrl-C ends a run with a checkpoint and says how to go on; the resumed run counts every trajectory once."""

from __future__ import annotations

import signal

import pytest
from short_run import BATCH, SHORT, Home

from infra.ledger import Ledger, RunStatus, TrajectoryState
from sao_core.trajectory import Purpose


@pytest.fixture(scope="module")
def interrupted(home: Home, finished) -> tuple[str, str]:
    """A run that got a Ctrl-C after its second step: its id and what it printed."""
    assert home.sao("export", finished["run_id"], "start").returncode == 0
    settings = (*SHORT, f"model.path={home.folder / 'start'}", "warm_start.enabled=false", "learner.updates=40")
    process = home.train(*settings)
    run_id = home.wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "Traceback" not in stdout + stderr
    return run_id, stdout


def test_ctrl_c_keeps_a_checkpoint_of_the_last_step_and_says_how_to_go_on(home: Home, interrupted):
    run_id, stdout = interrupted
    ledger = Ledger(home.settings.database_url)
    run = ledger.run(run_id)
    checkpoint = ledger.latest_checkpoint(run_id)
    assert run.status is RunStatus.CANCELLED
    assert checkpoint is not None
    assert checkpoint.step == run.step
    assert f"stopped with the checkpoint of step {run.step}. Continue with: sao train --resume {run_id}" in stdout


def test_a_resumed_run_completes_and_counts_every_trajectory_once(home: Home, interrupted):
    """With fewer updates and another learning rate, which is told and written down; then it says how to train on."""
    run_id, _ = interrupted
    ledger = Ledger(home.settings.database_url)
    before = ledger.run(run_id).step
    changed = ("--set", f"learner.updates={before + 3}", "--set", "policy.lr=5e-4")
    done = home.sao("train", "--resume", run_id, *changed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"changed: learner.updates: 40 → {before + 3}" in done.stdout
    assert [change.setting for change in ledger.config_changes(run_id)] == ["learner.updates", "policy.lr"]
    updates = ledger.updates_since(run_id, 0)
    assert [u.step for u in updates] == list(range(1, before + 4))
    assert updates[-1].metrics["policy/lr"] == 5e-4
    trained = [row for row in ledger.trajectories(run_id, Purpose.TRAIN) if row.state is TrajectoryState.TRAINED]
    assert len({row.request_number for row in trained}) == len(trained) == BATCH * (before + 3)

    again = home.sao("train", "--resume", run_id)
    assert again.returncode == 2
    assert f"sao train --resume {run_id} --set learner.updates={2 * (before + 3)}" in again.stderr
