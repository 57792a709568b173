"""What the children of test_processes.py do; run as a script, it is the parent that gets killed."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path


def lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Place:
    folder: Path
    limit: int


def adder(channel):
    channel.serve({"add": lambda a, b: a + b, "slow": _slow, "fail": _fail, "modules": _modules, "env": os.environ.get})


def _slow(seconds, value):
    time.sleep(seconds)
    return value


def _fail(message):
    raise ArithmeticError(message)


def _modules():
    return sorted({name.partition(".")[0] for name in sys.modules})


def typed(channel, place: Place, names: tuple[str, ...]):
    channel.serve(
        {"show": lambda: [type(place.folder).__name__, str(place.folder), place.limit + 1, type(names).__name__]}
    )


def worker(channel):
    channel.progress(tokens=1)
    channel.progress(tokens=2, incarnation=channel.incarnation)
    channel.stop.wait()


def learner(channel, folder: Path):
    channel.stop.wait()
    time.sleep(0.3)
    (folder / "checkpoint").write_text("complete")
    return {"step": 12}


def broken(channel):
    raise ValueError(f"incarnation {channel.incarnation} cannot start")


def breaks_once(channel):
    if channel.incarnation == 0:
        raise ValueError("the first time fails")
    channel.serve({"incarnation": lambda: channel.incarnation})


def job(channel, value: int):
    return value * 2


def segfault(channel):
    os.kill(os.getpid(), signal.SIGSEGV)


def deaf(channel):
    while True:
        time.sleep(60)


def main(folder: Path) -> None:
    from infra.processes import ChildGroup

    group = ChildGroup(folder)
    group.start("learner", learner, {"folder": folder}, when_orphaned="stop")
    group.start("rollout-0", worker)
    group.start("rollout-1", deaf)
    while not group.progress("rollout-0"):
        group.watch(0.05)
    print(json.dumps(group.alive()), flush=True)
    while True:
        group.watch(1)


if __name__ == "__main__":
    import child_targets

    child_targets.main(Path(sys.argv[1]))
