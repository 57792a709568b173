"""A rig: the real ledger, store and ports in real processes that are killed at named points, many times a second.

    supervisor ── fork ──▶ resume    begins an attempt of the run
        │ reaps, restarts  learner   claims, trains, commits, publishes, keeps checkpoints
        ▼                  worker ×3 lease, generate, record, load policies
      calm                 issuer    issues prompts

The supervisor is a process of its own without threads, and opens neither database nor store before all members have
ended; then it checks what they left (:mod:`rig_checks`). Run as a script with a plan in JSON; `run_rig` does that.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.session
from kill_points import ANY_TIME, POINTS, Point, arm, die, stall
from rig_disk import Disk, let_writes_fail
from rig_members import FENCED, FINISHED, ROLES, STOPPED, STORE_FULL, exit_code, note_recorded, rehearse
from rig_plan import Plan

FATES = {"learner": (0.85, 0.15), "worker": (0.6, 0.05), "issuer": (0.7, 0.3), "resume": (0.15, 0.0)}
"""How many members of a role are to die at a point, and how many at any time; the others live on."""
STALLED = 0.15
"""Of the learners that come by their point so many stall there instead of dying: the run is resumed beside them."""
PATIENCE_S = 20.0
"""A member that has not come by its point in this time dies where it is."""
IMPORTED_LATE = (
    "fsspec.implementations.local",
    "pandas",
    "psycopg",
    "pyarrow.pandas_compat",
    "s3fs",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)
"""What libraries import at their first call: here before the first fork, so that a start costs milliseconds."""


@dataclass
class Member:
    """One process."""

    role: str
    attempt: int
    point: Point | None
    doom_at: float
    hit: bool = False
    continue_at: float | None = None


@dataclass
class Result:
    """What came of a rig; `problems` is empty if everything held."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    attempts: int = 0
    recorded: int = 0
    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    store_full: list[str] = field(default_factory=list)
    """What the members said that found the disk full."""
    partial_files: list[str] = field(default_factory=list)
    """What they left half-made."""
    seconds: float = 0.0


class Supervisor:
    """Forks the members of a rig, reaps them, and starts again whoever died."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.result = Result(plan.seed)
        self.members: dict[int, Member] = {}
        self.attempt: int | None = None
        self.learner: int | None = None
        self.finished = False
        self.disk = Disk(plan) if plan.fill_disk else None
        self.points = [point for point in POINTS if not plan.points or point.name in plan.points]

    def run(self) -> Result:
        """From the first attempt to the last step; every member has ended when this returns."""
        started = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            while not (self.finished or self.result.problems):
                if self.disk is not None:
                    self.look_at_disk(self.disk)
                self.staff()
                self.look_after()
                if time.monotonic() > started + self.plan.limit_s:
                    self.result.problems.append(f"not finished after {self.plan.limit_s:.0f} s: {self.describe()}")
                signal.sigtimedwait({signal.SIGCHLD}, 0.01)
                self.reap()
            self.close()
        finally:
            for pid in self.members:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.result.seconds = time.monotonic() - started
        return self.result

    def staff(self) -> None:
        """Fork whoever is missing."""
        if self.attempt is None:
            if not self.count("resume"):
                self.fork("resume", 0)
            return
        if self.learner is None:
            self.learner = self.fork("learner", self.attempt)
        while self.count("worker", self.attempt) < self.plan.workers:
            self.fork("worker", self.attempt)
        if not self.count("issuer"):
            self.fork("issuer", 0)

    def look_after(self) -> None:
        """Kill whose time has come, continue who stalled long enough, and call for calm after the last kill."""
        now = time.monotonic()
        for pid, member in self.members.items():
            if member.continue_at is not None:
                if now >= member.continue_at:
                    member.continue_at = None
                    os.kill(pid, signal.SIGCONT)
            elif self.harming and now >= member.doom_at and not member.hit:
                member.hit = True
                os.kill(pid, signal.SIGKILL)
        if self.plan.kills and not self.harming:
            self.plan.calm.touch()

    def reap(self) -> None:
        """Take note of everyone who ended or stalled."""
        while self.members:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                member = self.members[pid]
                self.result.stalls[self.name_of(member)] += 1
                member.continue_at = time.monotonic() + self.rng.uniform(0.2, 3.0)
            else:
                self.ended(pid, self.members.pop(pid), status)
            if pid == self.learner:
                self.learner = self.attempt = None

    def ended(self, pid: int, member: Member, status: int) -> None:
        """Take note of how a member ended."""
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            self.result.kills[self.name_of(member)] += 1
        elif code == STORE_FULL:
            self.result.store_full.append(self.story(pid).splitlines()[-1])
        elif code == FINISHED and member.role == "resume":
            self.attempt = max(entry["number"] for entry in self.plan.said("attempt"))
        elif code == FINISHED and member.role == "learner":
            self.finished = True
        elif code not in (FINISHED, FENCED, STOPPED, -signal.SIGTERM):
            self.result.problems.append(f"{member.role} ended with code {code}: {self.story(pid)}")

    def story(self, pid: int) -> str:
        """The traceback that a member left."""
        crash = self.plan.path(f"crash-{pid}.txt")
        return crash.read_text() if crash.exists() else ""

    def look_at_disk(self, disk: Disk) -> None:
        """Fill the disk; once somebody has ended for it, stop everybody, make room, and go on with a new attempt."""
        disk.look()
        if disk.full and self.result.store_full:
            self.close()
            self.result.partial_files = disk.make_room()
            self.attempt = self.learner = None

    def close(self) -> None:
        """Tell everybody to stop, and wait for them."""
        deadline = time.monotonic() + 30
        for pid, member in self.members.items():
            member.continue_at = None
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
        while self.members and time.monotonic() < deadline and not self.result.problems:
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self.reap()
        if self.members and not self.result.problems:
            self.result.problems.append(f"did not stop within 30 s: {self.describe()}")

    def fork(self, role: str, attempt: int) -> int:
        """Start a member, armed or doomed."""
        at_point, at_any_time = self.fates(role)
        fate = self.rng.random()
        point = self.choose(role) if fate < at_point else None
        lives_s = PATIENCE_S if point is not None else self.rng.uniform(0.02, 1.0)
        doom_at = time.monotonic() + lives_s if fate < at_point + at_any_time else float("inf")
        occurrence = self.rng.randint(1, point.most) if point is not None else 0
        stalls = role == "learner" and point is not None and point.when != "in transaction"
        act = stall if stalls and (self.plan.stalls or self.rng.random() < STALLED) else die
        seed = self.rng.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            _be(self.plan, role, attempt, seed, point, occurrence, act)
        self.members[pid] = Member(role, attempt, point, doom_at)
        return pid

    @property
    def harming(self) -> bool:
        """Whether there is more harm to do."""
        done = self.result.stalls if self.plan.stalls else self.result.kills
        return done.total() - done[ANY_TIME] < self.plan.kills

    def fates(self, role: str) -> tuple[float, float]:
        """How likely a member of a role is to die at a point, and at any time."""
        if not self.harming:
            return 0.0, 0.0
        if self.plan.stalls:
            return (1.0, 0.0) if role == "learner" else (0.0, 0.0)
        return FATES[role]

    def choose(self, role: str) -> Point | None:
        """A point of a role at which few have died or are to die."""
        due = self.result.kills + self.result.stalls
        due.update(member.point.name for member in self.members.values() if member.point is not None)
        mine = [point for point in self.points if point.role == role]
        if self.plan.stalls:
            mine = [point for point in mine if point.when != "in transaction"]
        return min(mine, key=lambda point: (due[point.name], self.rng.random()), default=None)

    def count(self, role: str, attempt: int | None = None) -> int:
        """How many members of a role there are."""
        return sum(m.role == role and attempt in (None, m.attempt) for m in self.members.values())

    @staticmethod
    def name_of(member: Member) -> str:
        """Where a member died."""
        return ANY_TIME if member.hit or member.point is None else member.point.name

    def describe(self) -> str:
        """Who is there."""
        everyone = ", ".join(f"{m.role} {pid} of attempt {m.attempt}" for pid, m in self.members.items())
        return f"{self.result.kills.total()} kills; {everyone}"


def _be(plan: Plan, role: str, attempt: int, seed: int, point: Point | None, occurrence: int, act: Any) -> None:
    """What a forked process does: be a member, and leave with an exit code."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no member outlives its supervisor
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        random.seed(seed)
        note_recorded(plan)
        if plan.fill_disk and not plan.disk_mb:
            let_writes_fail(plan)
        if point is not None:
            arm(plan, point, occurrence, lambda: act(plan, point))
        arguments = {"worker": (attempt, seed), "learner": (attempt, seed)}.get(role, ())
        ROLES[role](plan, *arguments)
        code = FINISHED
    except BaseException as error:  # whatever it is, the supervisor gets its traceback
        code = exit_code(error)
        plan.path(f"crash-{os.getpid()}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def run_rig(plan: Plan) -> Result:
    """Run a rig to its end in a process of its own."""
    process = start_rig(plan)
    return finish_rig(plan, process)


def start_rig(plan: Plan) -> subprocess.Popen[bytes]:
    """Start a rig; its `folder` is made."""
    Path(plan.folder).mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"} | plan.environment
    command = [sys.executable, __file__, plan.dump()]
    if plan.disk_mb:
        Path(plan.object_store).mkdir(parents=True)
        mount = f'mount -t tmpfs -o size={plan.disk_mb}m tmpfs "$0" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, plan.object_store, *command]
    with plan.path("rig.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finish_rig(plan: Plan, process: subprocess.Popen[bytes]) -> Result:
    """Wait for a rig to end, and return what came of it."""
    try:
        process.wait(plan.limit_s + 120)
    finally:
        process.kill()
    written = plan.path("result.json")
    if not written.exists():
        log = plan.path("rig.log").read_text(errors="replace")
        return Result(plan.seed, problems=[f"the rig ended with code {process.returncode}: {log[-3000:]}"])
    values = json.loads(written.read_text())
    return Result(**values | {"kills": Counter(values["kills"]), "stalls": Counter(values["stalls"])})


def prepare(plan: Plan) -> None:
    """Do once, before the first fork and without a thread, what else every member would do for itself."""
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    rehearse(Path(plan.folder))
    if plan.endpoint_url:
        read: Any = botocore.loaders.JSONFileLoader.load_file
        models: dict[str, Any] = {}
        botocore.loaders.JSONFileLoader.load_file = lambda self, path: (
            models.get(path) or models.setdefault(path, read(self, path))
        )
        botocore.session.get_session().create_client("s3", region_name="us-east-1")


def main() -> None:
    """Run the plan of the command line, check what it left, and write the result."""
    plan = Plan.load(sys.argv[1])
    prepare(plan)
    result = Supervisor(plan).run()
    if not result.problems:
        from rig_checks import check

        check(plan, result)
    plan.path("result.json").write_text(json.dumps(vars(result)))


if __name__ == "__main__":
    main()
