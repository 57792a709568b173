"""A real `sao train` whose processes are killed, by a plan or at random, and which is resumed until it completes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from short_run import FASTEST, FASTEST_BATCH, Home, once_each, points_per_step

from infra.ledger import Ledger, RunStatus, TrajectoryState
from infra.objects import ObjectStore
from infra.verify import verify

if TYPE_CHECKING:
    from rig_tally import Tally

INJECT = Path(__file__).with_name("inject")
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Point:
    """A place in the code at which a process may be killed."""

    name: str
    process: str
    at: str
    when: str = "before"
    holding: str = ""


POINTS = {
    point.name: point
    for point in (
        Point("worker generates", "rollout-*", "sao_core.rollout.transformers_engine:TransformersEngine.step", "after"),
        Point("worker has put the object", "rollout-*", "infra.ledger.trajectories:TrajectoryLedger.record"),
        Point("worker has recorded", "rollout-*", "infra.ledger.trajectories:TrajectoryLedger.record", "after"),
        Point("worker loads a policy", "rollout-*", "infra.manifest:file_sha256", "after", "/policies/"),
        Point("worker holds leases", "rollout-*", "infra.ledger.requests:RequestLedger.heartbeat", "after"),
        Point("evaluator generates", "evaluator", "sao_core.rollout.transformers_engine:TransformersEngine.step"),
        Point("evaluator has put the object", "evaluator", "infra.ledger.trajectories:TrajectoryLedger.record"),
        Point("learner has claimed", "learner", "infra.ledger.trajectories:TrajectoryLedger.claim", "after"),
        Point("learner is between critic and policy", "learner", "sao_core.training:Training.update_policy"),
        Point("learner publishes a policy", "learner", "infra.objects:ObjectStore.put_file", "after", "/policies/"),
        Point("learner has published, not committed", "learner", "infra.ledger.updates:UpdateLedger.commit_update"),
        Point("learner has committed", "learner", "infra.ledger.updates:UpdateLedger.commit_update", "after"),
        Point("learner writes a checkpoint", "learner", "infra.objects:ObjectStore.put_file", "after", "/checkpoints/"),
        Point(
            "learner has not announced the checkpoint", "learner", "infra.ledger.updates:UpdateLedger.set_checkpoint"
        ),
        Point("learner drops checkpoints", "learner", "infra.ledger.updates:UpdateLedger.remove_checkpoints", "after"),
        Point("learner has rewound", "learner", "infra.ledger.updates:UpdateLedger.rewind", "after"),
        Point("learner resumes", "learner", "sao_core.training:Training._restore", "after"),
        Point("flow commands", "flow", "infra.training_run:TrainingRun.command"),
        Point("flow has a report", "flow", "infra.training_run:TrainingRun.command", "after"),
        Point("flow has begun an attempt", "flow", "infra.ledger.runs:RunLedger.begin_attempt", "after"),
        Point("flow is about to end", "flow", "infra.ledger.runs:RunLedger.set_status"),
    )
}


@dataclass(frozen=True)
class Kill:
    """One that happened."""

    name: str
    process: str
    at: float


class ChaosRun:
    """One training run in a home of its own, with a plan of kills."""

    def __init__(self, folder: Path, prefect_api: str, plan: Sequence[tuple[str, int]], *settings: str) -> None:
        """``plan``: (name of a point, which time it comes by there) in any order."""
        folder.mkdir(parents=True, exist_ok=True)
        entries = [{"id": f"{i}", **asdict(POINTS[name]), "nth": nth} for i, (name, nth) in enumerate(plan)]
        self._plan = folder / "plan.json"
        self._plan.write_text(json.dumps(entries))
        self._names = {entry["id"]: entry["name"] for entry in entries}
        self._settings = (*FASTEST, "rollout.restarts=100", *settings)
        path = os.pathsep.join(filter(None, (str(INJECT), os.environ.get("PYTHONPATH"))))
        variables = {"PREFECT_API_URL": prefect_api, "PYTHONPATH": path, "CHAOS_PLAN": str(self._plan)}
        self.home = Home(folder, variables)
        self.outputs: list[str] = []
        self.starts: list[float] = []

    @property
    def ledger(self) -> Ledger:
        """The run's ledger."""
        return Ledger(self.home.settings.database_url)

    @property
    def run_id(self) -> str:
        """The only run of this home."""
        return self.ledger.runs(1)[0].run_id

    def kills(self) -> list[Kill]:
        """Every kill so far, planned or not."""
        notes = self._plan.with_name("kills.jsonl")
        if not notes.exists():
            return []
        entries = [json.loads(line) for line in notes.read_text().splitlines()]
        return [Kill(self._names.get(e["id"], e["id"]), e["process"], e["at"]) for e in entries]

    def survive(self, disturb: Callable[[subprocess.Popen[str]], None] | None = None) -> None:
        """Start the run, and resume it until it completes; only kills may be the reason for a resume.

        Then `sao sync`, as a user would: a flow that is killed at its end may not have sent everything to MLflow.
        ``disturb`` is called again and again while a process lives.
        """
        while True:
            killed_before = len(self.kills())
            if self.attempt(disturb) == 0 or self.ledger.run(self.run_id).status is RunStatus.COMPLETED:
                break
            fatal = [kill for kill in self.kills()[killed_before:] if kill.process in ("learner", "flow")]
            assert fatal, f"the run ended although nobody killed learner or flow: {self.outputs[-1]}"
        synced = self.home.sao("sync", self.run_id)
        assert synced.returncode == 0, synced.stdout + synced.stderr

    def attempt(self, disturb: Callable[[subprocess.Popen[str]], None] | None = None) -> int:
        """One `sao train`, first or resumed; returns its exit code."""
        known = self.home.settings.home.exists() and bool(self.ledger.runs(1))
        options = [part for setting in self._settings for part in ("--set", setting)]
        arguments = ["--resume", self.run_id] if known else ["tiny", *options]
        self.starts.append(time.time())
        process = self.home.start("train", *arguments)
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"the run hangs; see {self.home.settings.home / 'logs'}")
            if disturb is not None:
                disturb(process)
            time.sleep(0.2)
        stdout, stderr = process.communicate()
        self.outputs.append(stdout + stderr)
        if process.returncode == 1:
            assert f"sao train --resume {self.run_id}" in stdout, stdout + stderr
        else:
            assert process.returncode in (0, -signal.SIGKILL), stdout + stderr
        assert "Traceback" not in stdout + stderr
        return process.returncode

    def children(self) -> dict[str, int]:
        """Process ids of the run's children that live, orphans among them."""
        return dict(_children(self._plan))

    def kill(self, name: str, pid: int) -> None:
        """Kill a process of this run now, and note it."""
        with open(self._plan.with_name("kills.jsonl"), "a") as notes:
            notes.write(
                json.dumps({"id": f"{_kind(name)} at random", "process": name, "pid": pid, "at": time.time()}) + "\n"
            )
        os.kill(pid, signal.SIGKILL)

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until no child of the run lives."""
        deadline = time.monotonic() + timeout_s
        while children := self.children():
            assert time.monotonic() < deadline, f"still there after {timeout_s:g} s: {children}"
            time.sleep(0.1)

    def check(self, updates: int, tally: Tally) -> None:
        """Nothing lost, nothing twice: by the rules of `sao verify`, and counted once more; counts the run in."""
        ledger, run_id = self.ledger, self.run_id
        self.wait_until_gone(10)
        found = verify(ledger, ObjectStore.from_settings(self.home.settings), run_id, tracking_uri=self.tracking_uri)
        rows = ledger.trajectories(run_id)
        trained = [row for row in rows if row.state is TrajectoryState.TRAINED]
        tally.kills.update(f"full stack: {kill.name}" for kill in self.kills())
        tally.recorded += len(rows)
        tally.lost += sum(violation.rule == "objects" for violation in found.violations)
        tally.trained_twice += len(trained) - len({row.request_number for row in trained})
        assert ledger.run(run_id).status is RunStatus.COMPLETED
        assert found.ok, found.violations
        assert not found.skipped, found.skipped
        assert [update.step for update in ledger.updates_since(run_id, 0)] == list(range(1, updates + 1))
        assert len({row.request_number for row in trained}) == len(trained) == FASTEST_BATCH * updates
        assert points_per_step(self.tracking_uri, ledger.run(run_id).mlflow_run_id) == once_each(updates)

    @property
    def tracking_uri(self) -> str:
        """Where MLflow keeps this run."""
        return self.home.settings.tracking_uri

    def recoveries(self) -> list[tuple[Kill, float]]:
        """Each kill with the seconds until the next committed update."""
        ledger = self.ledger
        committed = sorted(row.committed_at for row in ledger.updates_since(self.run_id, 0))
        pairs = [(kill, next((at for at in committed if at > kill.at), None)) for kill in self.kills()]
        return [(kill, at - kill.at) for kill, at in pairs if at is not None]


class AtRandom:
    """Kills a process of a run at random every few seconds."""

    def __init__(self, run: ChaosRun, seed: int, every_s: tuple[float, float], until: float) -> None:
        """Leave the run in peace after ``until`` on the monotonic clock."""
        self._until = until
        self._run = run
        self._random = random.Random(seed)
        self._every_s = every_s
        self._next = time.monotonic() + self._random.uniform(*every_s)

    def __call__(self, flow: subprocess.Popen[str]) -> None:
        """Kill one if it is time."""
        if not self._next <= time.monotonic() < self._until:
            return
        self._next = time.monotonic() + self._random.uniform(*self._every_s)
        living = [("flow", flow.pid), *self._run.children().items()]
        weights = [1 if name in ("flow", "learner") else 2 for name, _ in living]
        self._run.kill(*self._random.choices(living, weights)[0])


def _kind(name: str) -> str:
    return name.partition("-")[0].replace("rollout", "worker")


def _children(plan: Path) -> Iterator[tuple[str, int]]:
    """Children of any `sao` that was given this plan."""
    mark = f"CHAOS_PLAN={plan}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue  # it has just ended
        scripts = [place for place, argument in enumerate(arguments) if argument.endswith(b"infra/child.py")]
        if scripts:
            yield arguments[scripts[0] + 1].decode(), int(folder.name)
