"""One trajectory for people: its turns, and each action token with what the learner saw and made of it.

One that is there only as parts (its rollout goes on, or nobody could go on from them) is shown as far as it got.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.ledger import Ledger, PartRow, TrajectoryRow
from infra.objects import ObjectMissing, ObjectStore
from infra.policy_store import PolicyStore
from infra.rollout_parts import read_parts
from infra.settings import Settings
from infra.trajectory_store import TrajectoryStore
from infra.update_records import read_update_tokens
from sao_core.config import ConfigError
from sao_core.rollout.parts import UNFINISHED, join
from sao_core.trajectory import Role, Trajectory


def trajectory_json(ledger: Ledger, places: Settings, trajectory_id: str) -> dict[str, Any]:
    """A trajectory with one entry per token; ``advantage``, ``value`` and ``ratio`` only where they were recorded."""
    row, parts, trajectory, seen = _load(ledger, places, trajectory_id)
    pieces = _pieces(ledger, places, trajectory)
    tokens: list[dict[str, Any]] = []
    for index, text in enumerate(pieces):
        token: dict[str, Any] = {"text": text, "id": int(trajectory.token_ids[index]), "action": False}
        if trajectory.action_mask[index]:
            token |= {
                "action": True,
                "logprob": float(trajectory.behavior_logprobs[index]),
                "version": int(trajectory.policy_versions[index]),
                "reward": float(trajectory.rewards[index]),
                **{name: _number(column[index]) for name, column in seen.items()},
            }
        tokens.append(token)
    return {
        "trajectory_id": trajectory_id,
        "run_id": row.run_id,
        "purpose": str(row.purpose),
        "state": str(row.state) if not parts else UNFINISHED,
        "parts": len(parts),
        "trained_step": row.trained_step,
        "prompt_key": row.prompt_key,
        "difficulty": row.difficulty,
        "score": row.score,
        "outcome": str(row.outcome) if not parts else None,
        "stop_reason": row.stop_reason if not parts else None,
        "object": row.object_key,
        "turns": [{"role": str(t.role), "start": t.start, "stop": t.stop} for t in trajectory.turns],
        "tokens": tokens,
    }


def print_trajectory(ledger: Ledger, places: Settings, trajectory_id: str, console: Console) -> None:
    """Turn by turn; action tokens green where the advantage is positive, red where negative, struck where rejected."""
    row, parts, trajectory, seen = _load(ledger, places, trajectory_id)
    pieces = _pieces(ledger, places, trajectory)
    if parts:
        count = f"{len(parts)} part{'s' if len(parts) != 1 else ''}"
        heading = f"{trajectory_id}  {row.purpose}  unfinished ({count})  {parts[-1].state}  score {row.score:g}"
    else:
        heading = f"{trajectory_id}  {row.purpose}  {row.state}  score {row.score:g}  {row.outcome} ({row.stop_reason})"
    console.print(heading, highlight=False, markup=False)
    for turn in trajectory.turns:
        if turn.role is not Role.ASSISTANT:
            console.print(Text(f"\n{turn.role}", style="bold dim"))
            console.print(Text("".join(pieces[turn.start : turn.stop]).strip(), style="dim"))
            continue
        console.print(Text(f"\n{turn.role}", style="bold"))
        line = Text()
        for index in range(turn.start, turn.stop):
            line.append(pieces[index], style=_style(seen, index))
        console.print(line)
        console.print(_token_table(trajectory, pieces, seen, turn.start, turn.stop))
    if "advantage" not in seen and not parts:
        console.print(
            "advantages and values were not kept for this trajectory (learner.record_tokens=all keeps them)",
            style="dim",
        )


def _load(
    ledger: Ledger, places: Settings, trajectory_id: str
) -> tuple[TrajectoryRow, list[PartRow], Trajectory, dict[str, npt.NDArray[Any]]]:
    """The row, the parts if it is unfinished, the tokens, and what the learner recorded of them."""
    objects = ObjectStore.from_settings(places)
    row = ledger.trajectory(trajectory_id)
    if row is None:
        return _unfinished(ledger, objects, trajectory_id)
    rollout = TrajectoryStore(objects).read([row]) if row.num_segments == 1 else _segments(ledger, objects, row)
    trajectory = next(segment for segment in rollout[0] if segment.trajectory_id == trajectory_id)
    return row, [], trajectory, _seen(objects, row, trajectory)


def _unfinished(
    ledger: Ledger, objects: ObjectStore, trajectory_id: str
) -> tuple[TrajectoryRow, list[PartRow], Trajectory, dict[str, npt.NDArray[Any]]]:
    """What the parts of a rollout add up to, by the id ``RUN-NUMBER-ATTEMPT-SEGMENT`` that it would have."""
    run_id, *place = trajectory_id.rsplit("-", 3)
    if len(place) == 3 and all(number.isdecimal() for number in place):
        request, attempt, segment = map(int, place)
        parts = ledger.parts(run_id, request, attempt)
        parts = parts[max((index for index, part in enumerate(parts) if part.part == 0), default=0) :]
        joined = join(read_parts(objects, parts)).segments if parts else ()
        segments = [one for one in joined if one.action_mask.any()]
        if segment < len(segments):
            trajectory = replace(segments[segment], trajectory_id=trajectory_id)
            return TrajectoryRow.of(trajectory, parts[-1].object_key, 0, parts[-1].sha256), parts, trajectory, {}
    raise ConfigError(f"there is no trajectory {trajectory_id!r} in {ledger.label}; `sao show RUN` names some")


def _segments(ledger: Ledger, objects: ObjectStore, row: TrajectoryRow) -> list[tuple[Trajectory, ...]]:
    siblings = [
        other
        for other in ledger.trajectories(row.run_id, row.purpose)
        if (other.request_number, other.attempt) == (row.request_number, row.attempt)
    ]
    return TrajectoryStore(objects).read(siblings)


def _seen(objects: ObjectStore, row: TrajectoryRow, trajectory: Trajectory) -> dict[str, npt.NDArray[Any]]:
    """What the learner recorded of the tokens, if it did."""
    if row.trained_step is None:
        return {}
    try:
        recorded = read_update_tokens(objects, row.run_id, row.trained_step).get(row.trajectory_id)
    except ObjectMissing:
        return {}
    if recorded is None:
        return {}
    with np.errstate(over="ignore"):
        ratio = np.exp(recorded["logprobs"] - trajectory.behavior_logprobs)
    return {
        "advantage": recorded["advantages"],
        "value": recorded.get("values", np.full(trajectory.num_tokens, np.nan)),
        "ratio": ratio,
        "kept": recorded["kept"],
    }


def _pieces(ledger: Ledger, places: Settings, trajectory: Trajectory) -> list[str]:
    """The text of each token, by the tokenizer that is stored with the run's policies."""
    from tokenizers import Tokenizer

    objects = ObjectStore.from_settings(places)
    newest = ledger.newest_policy(trajectory.run_id)
    if newest is None:
        raise ConfigError(f"run {trajectory.run_id} has no policy whose tokenizer could read its trajectories")
    folder = PolicyStore(objects, ledger, places.cache).fetch(trajectory.run_id, newest.version)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode([int(i)], skip_special_tokens=False) for i in trajectory.token_ids]


def _style(seen: dict[str, npt.NDArray[Any]], index: int) -> str:
    if "advantage" not in seen:
        return ""
    advantage = float(seen["advantage"][index])
    shade = min(255, 90 + int(165 * min(1.0, abs(advantage))))
    colour = f"rgb(60,{shade},60)" if advantage >= 0 else f"rgb({shade},60,60)"
    return colour if seen["kept"][index] else f"{colour} strike"


def _token_table(
    trajectory: Trajectory, pieces: list[str], seen: dict[str, npt.NDArray[Any]], start: int, stop: int
) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("token", "log-prob", "ratio", "advantage", "value", "version"):
        table.add_column(heading, justify="left" if heading == "token" else "right")
    for index in range(start, stop):
        if not trajectory.action_mask[index]:
            continue
        numbers = [f"{seen[name][index]:.3f}" if name in seen else "–" for name in ("ratio", "advantage", "value")]
        table.add_row(
            Text(repr(pieces[index]), style=_style(seen, index)),
            f"{trajectory.behavior_logprobs[index]:.3f}",
            *numbers,
            str(trajectory.policy_versions[index]),
        )
    return table


def _number(value: Any) -> float | bool | None:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return float(value) if math.isfinite(float(value)) else None
