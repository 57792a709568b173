"""What must hold after a rig has ended: what was promised is there, and the weights agree with the ledger.

The weights of a rig are the list of the trajectories that made them, so that they are asked themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rig_members import KEPT, read_model
from rig_plan import Plan
from sqlalchemy import select

from infra.checkpoints import CheckpointStore
from infra.ledger import Ledger, TrajectoryState
from infra.ledger.database import Mode
from infra.models import TrajectoryEntry
from infra.policy_store import PolicyStore
from infra.verify import verify

if TYPE_CHECKING:
    from rig import Result


def check(plan: Plan, result: Result) -> None:
    """Fill in what a rig has lost, trained twice or broken otherwise."""
    ledger, objects = plan.open_ledger(), plan.open_objects()
    result.attempts = ledger.run(plan.run_id).attempt
    result.steps = ledger.last_step(plan.run_id)
    states = _states(ledger, plan.run_id)
    promised = {name for entry in plan.said("recorded") for name in entry["ids"]}
    result.recorded = len(promised)
    result.lost = sorted(name for name in promised if not _accounted_for(states.get(name)))

    latest = CheckpointStore(objects, ledger, plan.run_id, plan.path("check"), keep=KEPT).latest()
    if latest is None or latest[0] != result.steps:
        result.problems.append(f"the last step is {result.steps}, the newest checkpoint is {latest}")
        return
    weights = read_model(latest[1])
    result.trained_twice = sorted(name for name, times in Counter(weights["policy"]).items() if times > 1)
    trained = {name for name, (state, _) in states.items() if state == TrajectoryState.TRAINED}
    _compare(result, "policy in the checkpoint", weights["policy"], trained)
    _compare(result, "critic in the checkpoint", weights["critic"], trained)
    newest = ledger.newest_policy(plan.run_id)
    if newest is not None:
        published = PolicyStore(objects, ledger, plan.path("check")).fetch(plan.run_id, newest.version)
        _compare(result, "newest policy", read_model(published)["policy"], trained)
    verification = verify(ledger, objects, plan.run_id)
    result.problems += [f"{v.rule}: {v.subject}: {v.detail}" for v in verification.violations]
    ledger.close()


def _states(ledger: Ledger, run_id: str) -> dict[str, tuple[str, str | None]]:
    columns = (TrajectoryEntry.trajectory_id, TrajectoryEntry.state, TrajectoryEntry.reject_reason)
    statement = select(*columns).where(TrajectoryEntry.run_id == run_id)
    rows = ledger.transact(lambda connection: connection.execute(statement).all(), Mode.READ)
    return {row.trajectory_id: (row.state, row.reject_reason) for row in rows}


def _accounted_for(found: tuple[str, str | None] | None) -> bool:
    if found is None:
        return False
    state, reason = found
    return state != TrajectoryState.REJECTED or bool(reason)


def _compare(result: Result, what: str, names: list[str], trained: set[str]) -> None:
    if set(names) != trained or len(names) != len(set(names)):
        missing, extra = sorted(trained - set(names)), sorted(set(names) - trained)
        result.problems.append(
            f"the {what} was trained on {len(names)} trajectories ({len(set(names))} different ones), the ledger has "
            f"{len(trained)}: missing in the weights {missing[:3]}, missing in the ledger {extra[:3]}"
        )
