"""Train a very small model for an hour in real processes, kill rollout workers now and then, and judge the run.

    sao train ◀── started, and resumed whenever it ends before its time
    rollout-1 … rollout-3 ◀── SIGKILL at random moments; rollout-0 is spared, so that its memory can be followed
    soak.jsonl ── one line every ten seconds (memory of every process, queue, step) and one per event

Started again with the same home it goes on where it stopped; with no time left it only reports. What it keeps in memory
does not grow with the run. Prints one JSON line; exit code 1 if a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from sqlalchemy import func, select

from infra.ledger import Ledger, PartState
from infra.ledger.database import Mode
from infra.models import RolloutPart
from infra.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_S = 10.0
START_S = 900.0
"""How long a run may take to the first update of a start."""
STOP_S = 180.0
"""How long a run that was asked to stop may take."""
MAX_FRUITLESS_STARTS = 3
"""Starts in a row that may end without a new step."""
SPARED = "rollout-0"
BATCH = 4
RUN_AHEAD = 7


def configuration(home: Path) -> dict[str, Any]:
    """Batches are small and many in the making, so that an hour holds thousands of updates over long rollouts."""
    return {
        "recipe": "soak",
        "model": {"path": str(home / "model")},
        "environment": {"name": "benchmarks.soak.environment:SPEC"},
        "warm_start": {"enabled": True, "demonstrations": 6000, "epochs": 1, "batch_size": 16, "lr": 5e-3},
        "policy": {"lr": 1e-4, "first_update_step": 2},
        "critic": {"lr": 5e-4, "pretrain": {"rollouts": 32, "max_epochs": 3}},
        "rollout": {
            "workers": 4,
            "slots": 8,
            "threads": 1,
            "max_turns": 320,
            "max_action_tokens": 4096,
            "max_context_tokens": 8192,
            "on_swap": "keep",
            "partial_after_s": 10,
            "restarts": 1000,
        },
        "asynchrony": {"run_ahead": RUN_AHEAD},
        "learner": {"updates": 1_000_000, "batch_size": BATCH, "threads": 1, "checkpoint_every": 50},
        "evaluation": {"every": 250, "prompts": 8},
    }


class Journal:
    """What was seen, one JSON line each, appended; the time that counts begins with the first update of a start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.soak_s = max((line["soak_s"] for line in self), default=0.0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            with open(self.path) as lines:
                yield from (json.loads(line) for line in lines if line.endswith("\n"))

    def write(self, **values: Any) -> None:
        """Add a line with the time, of the clock and of the soak."""
        with open(self.path, "a") as lines:
            lines.write(json.dumps({"at": time.time(), "soak_s": round(self.soak_s, 1), **values}) + "\n")


class Soak:
    """One home's run: started or resumed, disturbed, watched."""

    def __init__(self, home: Path, seconds: float, kill_every_s: float) -> None:
        self.home = home
        self.seconds = seconds
        self.kill_every_s = kill_every_s
        home.mkdir(parents=True, exist_ok=True)
        self.settings = Settings.from_environment({"SAO_HOME": str(home / "state")})
        self.journal = Journal(home / "soak.jsonl")
        self.ledger = Ledger(self.settings.database_url)
        self._next_kill = self._kill_after()

    @property
    def run_id(self) -> str | None:
        """The run, once it is in the ledger."""
        runs = self.ledger.runs(1)
        return runs[0].run_id if runs else None

    def run(self) -> None:
        """Keep `sao` running until the time is over. Raises SystemExit if it does not get on."""
        self._end_leftover()
        fruitless = 0
        while self.journal.soak_s < self.seconds:
            step = self._step()
            with self._sao() as process:
                self._watch(process)
            fruitless = 0 if self._step() > step else fruitless + 1
            if fruitless == MAX_FRUITLESS_STARTS:
                raise SystemExit(f"the run made no step in {fruitless} starts; see {self.home / 'sao.log'}")

    @contextmanager
    def _sao(self) -> Iterator[subprocess.Popen[bytes]]:
        if not (self.home / "model").exists():
            build = [sys.executable, "-m", "benchmarks.soak.model", str(self.home / "model")]
            subprocess.run(build, cwd=ROOT, check=True)  # elsewhere: this process need not carry torch for an hour
        recipe = self.home / "soak.yaml"
        recipe.write_text(yaml.safe_dump(configuration(self.home), sort_keys=False))
        arguments = ["train", str(recipe)] if self.run_id is None else ["train", "--resume", self.run_id]
        foreign = ("SAO_", "PREFECT_", "MLFLOW_", "AWS_")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        with open(self.home / "sao.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *arguments],
                cwd=ROOT,
                env=environment | {"SAO_HOME": str(self.settings.home)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.journal.write(event="start", resumed=len(arguments) > 2, pid=process.pid)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self.journal.write(event="end", code=process.returncode, run=self.run_id)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Sample and kill until the process ends or the time is over."""
        started = before = time.monotonic()
        started_at = time.time()
        while process.poll() is None and self.journal.soak_s < self.seconds:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SAMPLE_S)
            now, family, run_id = time.monotonic(), processes(process.pid), self.run_id
            last = self.ledger.last_update(run_id) if run_id else None
            training = last is not None and last.committed_at > started_at
            if training:
                self.journal.soak_s += now - before
            elif now - started > START_S:
                return
            before = now
            if training and self.journal.soak_s >= self._next_kill:
                self._kill(family)
            self.journal.write(
                step=last.step if last else 0,
                memory={f"{name}/{pid}": memory_mb for name, (pid, memory_mb) in family.items()},
                queue=self.ledger.queue(run_id) if run_id else {},
                parts=self._open_parts(run_id) if run_id else 0,
            )

    def _kill(self, family: Mapping[str, tuple[int, float]]) -> None:
        workers = sorted(name for name in family if name.startswith("rollout-") and name != SPARED)
        if workers:
            name = random.choice(workers)
            with suppress(ProcessLookupError):
                os.kill(family[name][0], signal.SIGKILL)
            self.journal.write(event="kill", process=name, pid=family[name][0])
            self._next_kill = self._kill_after()

    def _kill_after(self) -> float:
        return self.journal.soak_s + self.kill_every_s * random.uniform(0.5, 1.5)

    def _step(self) -> int:
        return self.ledger.last_step(self.run_id) if self.run_id else 0

    def _open_parts(self, run_id: str) -> int:
        mine = (RolloutPart.run_id == run_id, RolloutPart.state == PartState.OPEN)
        count = select(func.count()).select_from(RolloutPart).where(*mine)
        return self.ledger.transact(lambda connection: connection.execute(count).scalar_one(), Mode.READ)

    def _end_leftover(self) -> None:
        """End the `sao` of a soak that was killed."""
        started = [line["pid"] for line in self.journal if line.get("event") == "start"]
        with suppress(psutil.Error):
            for process in map(psutil.Process, started[-1:]):
                if process.environ().get("SAO_HOME") == str(self.settings.home):
                    process.terminate()
                    process.wait(STOP_S)


def processes(pid: int) -> dict[str, tuple[int, float]]:
    """Every process of a run by its part in it → process id and resident megabytes."""
    found: dict[str, tuple[int, float]] = {}
    with suppress(psutil.Error):
        flow = psutil.Process(pid)
        for process in (flow, *flow.children(recursive=True)):
            with suppress(psutil.Error):
                name = "flow" if process.pid == pid else part_of(process.cmdline())
                name += f"+{process.pid}" if name in found else ""
                found[name] = process.pid, round(process.memory_info().rss / 2**20, 1)
    return found


def part_of(command: list[str]) -> str:
    """What a child of a run is, by its command line."""
    scripts = {Path(part).name: index for index, part in enumerate(command)}
    if "child.py" in scripts:
        return command[scripts["child.py"] + 1]
    if "keeper.py" in scripts:
        return "keeper"
    for service in ("prefect", "mlflow"):
        if any(service in part for part in command):
            return f"{service}-server"
    return Path(command[0]).name if command else "gone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--home", type=Path, default=Path(".soak"), help="where everything is kept")
    parser.add_argument("--kill-every", type=float, default=120.0, metavar="SECONDS", help="mean time between kills")
    parser.add_argument("--images", type=Path, help="where the charts go; default: HOME/images")
    arguments = parser.parse_args()
    home = arguments.home.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C does: stop the run, which leaves a checkpoint
    soak = Soak(home, arguments.minutes * 60, arguments.kill_every)
    soak.run()
    if soak.run_id is None:
        raise SystemExit(f"there is no run in {home}")
    from benchmarks.soak.report import report

    images = arguments.images or home / "images"
    verdict = report(soak.ledger, soak.settings, soak.run_id, soak.journal, images, bound=RUN_AHEAD + 1)
    print(json.dumps(verdict))
    raise SystemExit(0 if verdict["ok"] else 1)


if __name__ == "__main__":
    main()
