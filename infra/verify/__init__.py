"""Proof that a run is whole: nothing lost, nothing trained twice, everything stored as the ledger says.

`verify` reads only, and may run beside a live run: keys are listed first, then the ledger is read in one transaction,
so what is on its way is no violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.verify import accounts, points, stored
from infra.verify.accounts import Problem
from infra.verify.snapshot import read_snapshot


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold."""

    rule: str
    subject: str
    """The id of what is wrong."""
    detail: str
    """One sentence with the values."""


@dataclass(frozen=True)
class Verification:
    """What was checked of a run, and what was found."""

    run_id: str
    checked: Mapping[str, int]
    """Rule → how many things it looked at."""
    violations: tuple[Violation, ...]
    orphans: tuple[str, ...]
    """Object keys of the run that nothing refers to: allowed, for upkeep to remove."""
    skipped: Mapping[str, str]
    """Rule → why it could not be checked."""

    @property
    def ok(self) -> bool:
        """Whether every invariant holds that could be checked."""
        return not self.violations


def verify(
    ledger: Ledger,
    objects: ObjectStore,
    run_id: str,
    *,
    tracking_uri: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Check every invariant of a run; ``say`` is told the name of each rule when its turn comes.

    Raises:
        UnknownRun: there is none of that id.
        ObjectStoreError: the object store does not answer.
    """
    ledger.run(run_id)
    keys = objects.keys(f"runs/{run_id}")
    s = read_snapshot(ledger, run_id)
    checked: dict[str, int] = {}
    violations: list[Violation] = []
    skipped: dict[str, str] = {}

    def check(rule: str, looked_at: int, problems: Iterable[Problem]) -> None:
        say(rule)
        checked[rule] = looked_at
        violations.extend(Violation(rule, subject, detail) for subject, detail in problems)

    for name, (rule, looked_at) in accounts.RULES.items():
        check(name, looked_at(s), rule(s))
    folders = len(stored.stored_policies(s)) + len(stored.surviving_checkpoints(s))
    check("weights", folders, stored.weights(s, ledger, objects))
    check("objects", len(stored.checked_trajectories(s)), stored.trajectory_objects(s, ledger, objects))
    check("parts", len(s.parts), stored.parts(s, ledger, objects))
    try:
        sent = points.sent_points(s, tracking_uri)
    except points.NotReadable as reason:
        skipped["mlflow-points"] = str(reason)
    else:
        check("mlflow-points", sum(map(len, sent.values())), points.mlflow_points(s, sent))
    return Verification(
        run_id,
        MappingProxyType(checked),
        tuple(violations),
        tuple(stored.orphans(s, keys)),
        MappingProxyType(skipped),
    )
