"""The places at which a process is killed, by name, and how a process is made to die there.

`arm` wraps product functions in the calling process only: a child of the rig after its fork. The product itself knows
of no hook.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rig_plan import Plan
from sqlalchemy import Connection, Engine, event

from infra.ledger import Ledger

When = Literal["before", "within", "in transaction", "after", "late"]


@dataclass(frozen=True)
class Point:
    """One place: a function of the product, and when in its call.

    `in transaction`: after all of its SQL, before COMMIT. `within`: while it runs, some moments after it began. `late`:
    after the worker fell silent for longer than its lease; the call is made then, and the process dies after it.
    """

    name: str
    role: Literal["worker", "learner", "issuer", "resume"]
    function: str
    when: When
    key: str = ""
    """Only calls whose key (first argument) has this regular expression in it."""
    most: int = 3
    """It fires at one of the first so many calls."""


LEDGER = "infra.ledger:Ledger."
STORE = "infra.objects:ObjectStore."
MEMBERS = "rig_members:"
ANY_TIME = "at a random time"

POINTS = (
    Point("while generating", "worker", MEMBERS + "generate", "before", most=6),
    Point("while an object is put", "worker", STORE + "put", "within", "/trajectories/"),
    Point("after the object is put, before the row", "worker", LEDGER + "record", "before"),
    Point("in the transaction of the rows", "worker", LEDGER + "record", "in transaction"),
    Point("after the row, before the writer knows", "worker", LEDGER + "record", "after"),
    Point("after the lease ran out, the row still sent", "worker", LEDGER + "record", "late", most=2),
    Point("while writing a part of a rollout", "worker", STORE + "put", "within", "/parts/"),
    Point("after a part is put, before its row", "worker", LEDGER + "record_part", "before"),
    Point("in the transaction of a part", "worker", LEDGER + "record_part", "in transaction"),
    Point("after a part's row, before the whole", "worker", LEDGER + "record_part", "after"),
    Point("in the transaction of a lease", "worker", LEDGER + "lease", "in transaction"),
    Point("after the lease, before the worker knows", "worker", LEDGER + "lease", "after"),
    Point("in the transaction of a failed attempt", "worker", LEDGER + "fail_attempt", "in transaction", most=2),
    Point("while a worker loads a policy", "worker", "infra.manifest:_intact", "before", most=9),
    Point("in the transaction of a claim", "learner", LEDGER + "claim", "in transaction"),
    Point("after the claim", "learner", LEDGER + "claim", "after"),
    Point("between value and policy update", "learner", MEMBERS + "update_policy", "before"),
    Point("while a step's tokens are put", "learner", STORE + "put", "within", "/updates/"),
    Point("while publishing, between files", "learner", STORE + "put_file", "before", "/policies/", most=9),
    Point("while publishing, before the manifest", "learner", STORE + "put", "before", "/policies/.*manifest"),
    Point("after the policy's files, before the commit", "learner", LEDGER + "commit_update", "before"),
    Point("in the transaction of a step", "learner", LEDGER + "commit_update", "in transaction"),
    Point("after the commit, before the checkpoint", "learner", LEDGER + "commit_update", "after"),
    Point(
        "while writing a checkpoint, between files", "learner", STORE + "put_file", "before", "/checkpoints/", most=6
    ),
    Point(
        "while writing a checkpoint, before its manifest", "learner", STORE + "put", "before", "/checkpoints/.*manif"
    ),
    Point("after a checkpoint's manifest, before its row", "learner", LEDGER + "set_checkpoint", "before"),
    Point("in the transaction of a checkpoint", "learner", LEDGER + "set_checkpoint", "in transaction", most=3),
    Point("after a checkpoint's row", "learner", LEDGER + "set_checkpoint", "after", most=3),
    Point("old checkpoints forgotten, their files there", "learner", LEDGER + "remove_checkpoints", "after", most=3),
    Point("while removing an old checkpoint", "learner", STORE + "delete_prefix", "before", "/checkpoints/", most=3),
    Point("old policies forgotten, their files there", "learner", LEDGER + "remove_policies", "after", most=3),
    Point("while removing an old policy", "learner", STORE + "delete_prefix", "before", "/policies/", most=6),
    Point("during resume, while loading the checkpoint", "learner", "infra.manifest:_intact", "before", most=6),
    Point("during resume, before the rewind", "learner", LEDGER + "rewind", "before", most=1),
    Point("during resume, in the transaction of the rewind", "learner", LEDGER + "rewind", "in transaction", most=1),
    Point("during resume, rewound but not announced", "learner", LEDGER + "rewind", "after", most=1),
    Point("during resume, after the announcement", "learner", LEDGER + "announce", "after", most=1),
    Point("in the transaction of a new attempt", "resume", LEDGER + "begin_attempt", "in transaction", most=1),
    Point("after a new attempt, before its processes", "resume", LEDGER + "begin_attempt", "after", most=1),
    Point("in the transaction that issues prompts", "issuer", LEDGER + "issue", "in transaction", most=25),
    Point("after prompts were issued", "issuer", LEDGER + "issue", "after", most=25),
)
BY_NAME = {point.name: point for point in POINTS}

_inside = threading.local()


def arm(plan: Plan, point: Point, occurrence: int, act: Callable[[], None]) -> None:
    """Have ``act`` called in this process at the ``occurrence``-th time (from 1) that it comes by ``point``."""
    owner, name = _resolve(point.function)
    original = getattr(owner, name)
    counted = itertools.count(1)
    about = re.compile(point.key)

    def due(args: tuple[Any, ...]) -> bool:
        return about.search(_key(args)) is not None and next(counted) == occurrence

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not due(args):
            return original(*args, **kwargs)
        if point.when == "before":
            act()
        elif point.when == "within":
            threading.Timer(random.random() * 0.003, act).start()
        elif point.when == "in transaction":
            _inside.act = act
        elif point.when == "late":
            Ledger.heartbeat = lambda *_, **__: []  # type: ignore[method-assign]
            time.sleep(1.3 * plan.lease_s)
        result = original(*args, **kwargs)
        _inside.act = None
        if point.when in ("after", "late"):
            act()
        return result

    setattr(owner, name, wrapped)
    if point.when == "in transaction":

        @event.listens_for(Engine, "commit")
        def before_commit(_: Connection) -> None:
            if getattr(_inside, "act", None) is not None:
                _inside.act()


def die(plan: Plan, point: Point) -> None:
    """Note the place and kill this process, unless all is calm by now."""
    if not plan.calm.exists():
        plan.say("kill", point=point.name)
        os.kill(os.getpid(), signal.SIGKILL)


def stall(plan: Plan, point: Point) -> None:
    """Note the place and stop this process until somebody continues it, unless all is calm by now."""
    if not plan.calm.exists():
        plan.say("stall", point=point.name)
        os.kill(os.getpid(), signal.SIGSTOP)


def _key(args: tuple[Any, ...]) -> str:
    return next((str(arg) for arg in args if isinstance(arg, str)), "")


def _resolve(function: str) -> tuple[Any, str]:
    module, _, path = function.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name
