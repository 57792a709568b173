"""What `sao verify` and `sao upkeep` say, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from infra.upkeep import Action
from infra.verify import Verification

ORPHANS_SHOWN = 5


def verification_json(found: Verification) -> dict[str, Any]:
    """A verification as JSON."""
    return {
        "run_id": found.run_id,
        "ok": found.ok,
        "checked": dict(found.checked),
        "violations": [asdict(violation) for violation in found.violations],
        "orphans": list(found.orphans),
        "skipped": dict(found.skipped),
    }


def print_verification(found: Verification, console: Console) -> None:
    """What each rule looked at and found, every violation on a line of its own, and the orphans."""
    table = Table("rule", Column("looked at", justify="right"), Column("violations", justify="right"))
    for rule, count in found.checked.items():
        wrong = sum(violation.rule == rule for violation in found.violations)
        table.add_row(rule, f"{count:,}", f"[red]{wrong:,}[/red]" if wrong else "0")
    for rule in found.skipped:
        table.add_row(rule, "skipped", "–")
    console.print(table)
    for rule, reason in found.skipped.items():
        _line(console, f"{rule} skipped: {reason}")
    for violation in found.violations:
        _line(console, f"{violation.rule}: {violation.subject}: {violation.detail}")
    if found.orphans:
        some = ", ".join(found.orphans[:ORPHANS_SHOWN])
        more = f" and {len(found.orphans) - ORPHANS_SHOWN:,} more" if len(found.orphans) > ORPHANS_SHOWN else ""
        _line(
            console, f"{len(found.orphans):,} objects to which nothing refers (sao upkeep removes them): {some}{more}"
        )
    verdict = "every invariant holds" if found.ok else f"{len(found.violations):,} violations"
    _line(console, f"{found.run_id}: {verdict}")


def upkeep_json(actions: Sequence[Action], grace_s: float, dry_run: bool) -> dict[str, Any]:
    """A round of upkeep as JSON."""
    return {
        "dry_run": dry_run,
        "grace_s": grace_s,
        "bytes": sum(action.bytes for action in actions),
        "actions": [asdict(action) for action in actions],
    }


def print_upkeep(actions: Sequence[Action], dry_run: bool, console: Console) -> None:
    """What was done, or would be."""
    if not actions:
        return _line(console, "nothing to do")
    table = Table("what", Column("which", overflow="fold"), Column("size", justify="right", no_wrap=True), "why")
    for action in actions:
        table.add_row(action.kind, action.subject, size(action.bytes) if action.bytes else "", action.reason)
    console.print(table)
    total = size(sum(action.bytes for action in actions))
    done = f"would do {len(actions):,} things and free {total}" if dry_run else f"{len(actions):,} done, {total} freed"
    return _line(console, done)


def size(count: int) -> str:
    """Bytes for people."""
    for unit, length in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= length:
            return f"{count / length:.1f} {unit}"
    return f"{count} B"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
