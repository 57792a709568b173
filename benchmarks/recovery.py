"""From a kill to training again: seconds, and the work that was lost. One JSON line.

A short run makes the starting model. Then a run's rollout worker is killed several times: how long until the ledger has
a rollout of its replacement, how long the learner waited for rollouts meanwhile, and what the dead one held. At last
the learner is killed and the run resumed with one command: how long until the next commit, and what was undone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
from sqlalchemy import func, select

from infra.ledger import Ledger, RequestState
from infra.ledger.database import Mode
from infra.models import FailedAttempt, Request, TrajectoryEntry, Update
from infra.settings import Settings

T = TypeVar("T")

TIMEOUT_S = 300.0
LATENCY_S = 0.3
"""Mean time of a tool call, so that rollouts take long enough to be interrupted."""
BATCH = 16
CHECKPOINT_EVERY = 10
SETTINGS = (
    "learner.updates=1000000",
    f"learner.batch_size={BATCH}",
    f"learner.checkpoint_every={CHECKPOINT_EVERY}",
    "rollout.workers=2",
    "rollout.slots=16",
    "rollout.restarts=100",
    "warm_start.enabled=false",
    "critic.pretrain.rollouts=32",
    "critic.pretrain.max_epochs=2",
    "policy.first_update_step=1",
    "evaluation.every=0",
    "evaluation.prompts=1",
    f"environment.options.tool_latency_mean_s={LATENCY_S}",
)


class Home:
    """A folder in which `sao` runs, and its ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(Settings.from_environment({}, directory=folder).database_url)

    @property
    def run_id(self) -> str:
        """The newest run."""
        return self.ledger.runs(1)[0].run_id

    def sao(self, *arguments: str) -> None:
        """Run `sao` to its end."""
        with self.started(*arguments) as process:
            if process.wait(TIMEOUT_S):
                raise SystemExit((self.folder / "sao.log").read_text()[-2000:])

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run `sao` until the block ends, then stop it."""
        with open(self.folder / "sao.log", "ab") as log:
            command = [sys.executable, "-m", "flows.cli", *arguments]
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            if process.poll() is None:
                process.kill()
                process.wait()

    def until(self, look: Callable[[], T | None], what: str) -> T:
        """Wait for ``look`` to find something."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"no {what} within {TIMEOUT_S:g} s; see {self.folder / 'sao.log'}")
            time.sleep(0.02)
        return found

    def step_after(self, step: int) -> None:
        """Wait until a later step is committed."""
        self.until(lambda: self.ledger.last_step(self.run_id) > step or None, f"step after {step}")

    def one(self, statement: Any) -> Any:
        """A single value from the ledger."""
        return self.ledger.transact(lambda connection: connection.execute(statement).scalar_one(), Mode.READ)


def pid_of(flow: int, child: str) -> int | None:
    """Process id of a child of a run."""
    for process in psutil.Process(flow).children():
        with suppress(psutil.Error):
            command = process.cmdline()
            if child in command and any(part.endswith("child.py") for part in command):
                return process.pid
    return None


def kill_worker(home: Home, flow: int, number: int) -> dict[str, float]:
    """Kill a rollout worker that serves, and watch its replacement."""
    name = f"rollout-{number}"
    known = {worker.worker: worker for worker in home.ledger.workers(home.run_id)}
    pid = home.until(lambda: pid_of(flow, name), name)
    worker = next(record.worker for record in known.values() if record.pid == pid and record.worker.startswith(name))
    last = home.ledger.last_update(home.run_id)
    assert last is not None
    waits = [
        row.metrics["time/learner_wait_s"] for row in home.ledger.updates_since(home.run_id, max(0, last.step - 20))
    ]
    mine = (Request.run_id == home.run_id, Request.lease_worker == worker, Request.state == RequestState.LEASED)
    leased = select(func.count()).select_from(Request).where(*mine)
    held = home.until(lambda: home.one(leased) or None, f"rollout in {name}")
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    recorded = (TrajectoryEntry.run_id == home.run_id, TrajectoryEntry.object_key.like(f"%/{name}-%"))
    others = tuple(TrajectoryEntry.object_key.not_like(f"%/{old}/%") for old in known)
    found = select(func.count()).select_from(TrajectoryEntry).where(*recorded, *others)
    home.until(lambda: home.one(found) or None, f"rollout of the new {name}")
    seconds = time.monotonic() - killed_at
    home.until(lambda: home.one(leased) == 0 or None, "end of the dead one's leases")
    returned_s = time.monotonic() - killed_at
    home.step_after(home.ledger.last_step(home.run_id))
    after = home.ledger.updates_since(home.run_id, last.step)
    failed = (FailedAttempt.run_id == home.run_id, FailedAttempt.worker == worker)
    tokens = select(func.avg(TrajectoryEntry.num_action_tokens)).where(TrajectoryEntry.run_id == home.run_id)
    lost = home.one(select(func.count()).select_from(FailedAttempt).where(*failed))
    return {
        "until_recording_s": seconds,
        "until_leases_return_s": returned_s,
        "learner_wait_before_s": median(waits),
        "learner_wait_longest_s": max(row.metrics["time/learner_wait_s"] for row in after),
        "steps_meanwhile": len(after),
        "rollouts_held": held,
        "attempts_lost": lost,
        "action_tokens_lost_at_most": round(lost * float(home.one(tokens))),
    }


def kill_learner(home: Home, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Kill the learner half-way between two checkpoints, and resume the run as soon as it has ended."""
    checkpoint = home.ledger.last_step(home.run_id) // CHECKPOINT_EVERY + 1
    home.step_after(checkpoint * CHECKPOINT_EVERY + CHECKPOINT_EVERY // 2 - 1)
    os.kill(home.until(lambda: pid_of(process.pid, "learner"), "learner"), signal.SIGKILL)
    killed_at = time.monotonic()
    process.wait(TIMEOUT_S)
    ended_s = time.monotonic() - killed_at
    last = home.ledger.last_step(home.run_id)
    committed = select(func.count()).select_from(Update).where(Update.run_id == home.run_id)
    before = home.one(committed)
    with home.started("train", "--resume", home.run_id):
        home.until(lambda: home.one(committed) > before or None, "commit after resuming")
        seconds = time.monotonic() - killed_at
        undone = (Update.run_id == home.run_id, Update.superseded, Update.step <= last)
        again = (TrajectoryEntry.run_id == home.run_id, TrajectoryEntry.rewound > 0)
        return {
            "until_exit_s": ended_s,
            "until_commit_s": seconds,
            "steps_undone": home.one(select(func.count()).select_from(Update).where(*undone)),
            "rollouts_to_train_again": home.one(select(func.count()).select_from(TrajectoryEntry).where(*again)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="of a rollout worker")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        quick = ("critic.pretrain.rollouts=0", "evaluation.every=0", "evaluation.prompts=1")
        short = ("learner.updates=2", "learner.batch_size=16", "warm_start.demonstrations=3000", *quick)
        home.sao("train", "tiny", *sets(*short))
        home.sao("export", home.run_id, "model")
        with home.started("train", "tiny", *sets(*SETTINGS, f"model.path={home.folder / 'model'}")) as process:
            home.until(lambda: len(home.ledger.runs(2)) == 2 or None, "second run")
            home.step_after(5)
            workers = [kill_worker(home, process.pid, index % 2) for index in range(arguments.kills)]
            learner = kill_learner(home, process)
    line = {
        "benchmark": "recovery",
        "tool_latency_mean_s": LATENCY_S,
        "batch": BATCH,
        "checkpoint_every": CHECKPOINT_EVERY,
        "worker_kills": len(workers),
        "worker": {name: round(median(kill[name] for kill in workers), 2) for name in workers[0]},
        "learner": {name: round(value, 2) for name, value in learner.items()},
    }
    print(json.dumps(line))


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


if __name__ == "__main__":
    main()
