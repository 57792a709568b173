"""A trajectory as JSON: what is recorded of it, its turns, and each token with what the learner saw and made of it.

One that is there only as parts (its rollout goes on, or nobody could go on from them) is shown as far as it got.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.ledger import Ledger, PartRow, RunRecord, TrajectoryRow
from infra.manifest import MANIFEST, CorruptFolder
from infra.objects import ObjectMissing, ObjectStore, ObjectStoreError
from infra.rollout_parts import CorruptPart, read_parts
from infra.settings import Settings
from infra.trajectory_store import CorruptObject, TrajectoryStore
from infra.update_records import read_update_tokens
from infra.viewer.pieces import token_texts
from sao_core.algorithms import describe_objective, resolve
from sao_core.config import ConfigError, parse_config
from sao_core.rollout.parts import UNFINISHED, join
from sao_core.trajectory import Trajectory

_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class _Seen:
    """What the learner recorded of the tokens, if it did."""

    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """``advantage``, ``value``, ``ratio`` (NaN where there is none) and ``kept``, of length T each."""
    policy_updated: bool | None = None
    """Whether the step moved the policy, so that there are ratios; None if nothing was recorded."""


@dataclass(frozen=True)
class _Found:
    row: TrajectoryRow
    trajectory: Trajectory
    parts: tuple[PartRow, ...] = ()
    """Of an unfinished one."""
    seen: _Seen = field(default_factory=_Seen)


def trajectory_view(ledger: Ledger, places: Settings, trajectory_id: str) -> dict[str, Any]:
    """A trajectory with one entry per token; ``advantage``, ``value`` and ``ratio`` only where they were recorded.

    The texts of the tokens, joined, are the text of the whole: a character that several tokens share stands with the
    first, and the others have no text and ``"continues": true``; control tokens of the model have ``"special": true``.
    Numbers are as stored, None where not finite.

    Raises:
        ConfigError: there is no such trajectory.
        ObjectStoreError: what is stored of it cannot be read, or is damaged.
    """
    objects = ObjectStore.from_settings(places)
    try:
        found = _find(ledger, objects, trajectory_id)
        tokenizer = _tokenizer(ledger, objects, found.row.run_id)
    except (CorruptObject, CorruptPart, CorruptFolder) as error:
        raise ObjectStoreError(str(error)) from error
    trajectory = found.trajectory
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    texts = token_texts(tokenizer, trajectory.token_ids.tolist(), (turn.start for turn in trajectory.turns))
    return {
        **_fate(found),
        **_circumstances(trajectory),
        **_learning(ledger.run(trajectory.run_id), found.seen),
        "messages": [message.as_dict() for message in trajectory.messages],
        "turns": [{"role": str(t.role), "start": t.start, "stop": t.stop} for t in trajectory.turns],
        "tokens": [_token(trajectory, found.seen.columns, index, text, special) for index, text in enumerate(texts)],
    }


def _fate(found: _Found) -> dict[str, Any]:
    """What the ledger knows: which one it is, how it ended, what became of it."""
    row, parts = found.row, found.parts
    return {
        "trajectory_id": row.trajectory_id,
        "run_id": row.run_id,
        "purpose": str(row.purpose),
        "state": UNFINISHED if parts else str(row.state),
        "parts": len(parts),
        "part_state": str(parts[-1].state) if parts else None,
        "trained_step": row.trained_step,
        "claimed_step": row.claimed_step,
        "reject_reason": row.reject_reason,
        "rewound": row.rewound,
        "prompt_key": row.prompt_key,
        "difficulty": row.difficulty,
        "group": row.group,
        "request_number": row.request_number,
        "attempt": row.attempt,
        "segment": row.segment,
        "num_segments": row.num_segments,
        "score": row.score,
        "outcome": None if parts else str(row.outcome),
        "stop_reason": None if parts else row.stop_reason,
        "object": row.object_key,
        "recorded_at": parts[-1].recorded_at if parts else row.recorded_at,
        "num_tokens": row.num_tokens,
        "num_action_tokens": row.num_action_tokens,
        "num_turns": row.num_turns,
        "versions": [row.version_min, row.version_max],
    }


def _circumstances(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sampling": asdict(trajectory.sampling),
        "on_swap": trajectory.on_swap,
        "renderer_hash": trajectory.renderer_hash,
        "environment": {
            "name": trajectory.environment,
            "version": trajectory.environment_version,
            "seed": trajectory.environment_seed,
        },
        "reward_parts": {name: _number(value) for name, value in trajectory.reward_parts.items()},
        "timings": {name: _number(value) for name, value in trajectory.timings.items()},
    }


def _learning(run: RunRecord, seen: _Seen) -> dict[str, Any]:
    try:
        config = parse_config(run.config)
        objective = describe_objective(resolve(config), config.algorithm)
    except ConfigError:  # a run of another version, with settings that this one does not have
        objective = None
    return {
        "recipe": run.recipe,
        "algorithm": run.algorithm,
        "objective": objective,
        "recorded_tokens": seen.policy_updated is not None,
        "policy_updated": seen.policy_updated,
    }


def _token(
    trajectory: Trajectory, seen: Mapping[str, npt.NDArray[Any]], index: int, text: str | None, special: set[int]
) -> dict[str, Any]:
    token: dict[str, Any] = {"text": text or "", "id": int(trajectory.token_ids[index]), "action": False}
    if text is None:
        token["continues"] = True
    if token["id"] in special:
        token["special"] = True
    if trajectory.action_mask[index]:
        token |= {
            "action": True,
            "logprob": float(trajectory.behavior_logprobs[index]),
            "version": int(trajectory.policy_versions[index]),
            "reward": float(trajectory.rewards[index]),
            **{name: _number(column[index]) for name, column in seen.items()},
        }
    return token


def _find(ledger: Ledger, objects: ObjectStore, trajectory_id: str) -> _Found:
    row = ledger.trajectory(trajectory_id)
    if row is None:
        return _unfinished(ledger, objects, trajectory_id)
    (rollout,) = TrajectoryStore(objects).read(ledger.rollout(row))
    trajectory = next(segment for segment in rollout if segment.trajectory_id == trajectory_id)
    return _Found(row, trajectory, seen=_seen(objects, row, trajectory))


def _unfinished(ledger: Ledger, objects: ObjectStore, trajectory_id: str) -> _Found:
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
            row = TrajectoryRow.of(trajectory, parts[-1].object_key, 0, parts[-1].sha256)
            return _Found(row, trajectory, tuple(parts))
    raise ConfigError(f"there is no trajectory {trajectory_id!r} in {ledger.label}; `sao show RUN` names some")


def _seen(objects: ObjectStore, row: TrajectoryRow, trajectory: Trajectory) -> _Seen:
    if row.trained_step is None:
        return _Seen()
    try:
        recorded = read_update_tokens(objects, row.run_id, row.trained_step).get(row.trajectory_id)
    except ObjectMissing:
        return _Seen()
    if recorded is None:
        return _Seen()
    unknown = np.full(trajectory.num_tokens, np.nan, np.float32)
    updated = bool(recorded["kept"].any() or recorded["logprobs"][trajectory.action_mask].any())
    with np.errstate(over="ignore"):
        ratio = np.exp(recorded["logprobs"] - trajectory.behavior_logprobs) if updated else unknown
    columns = {
        "advantage": recorded["advantages"],
        "value": recorded.get("values", unknown),
        "ratio": ratio,
        "kept": recorded["kept"],
    }
    return _Seen(columns, updated)


def _tokenizer(ledger: Ledger, objects: ObjectStore, run_id: str) -> Any:
    """The tokenizer that is stored with the run's policies, without their weights.

    Raises:
        ConfigError: there is none.
        CorruptFolder: it is not what was published.
    """
    from tokenizers import Tokenizer

    newest = ledger.newest_policy(run_id)
    if newest is None:
        raise ConfigError(f"run {run_id} has no policy whose tokenizer could read its trajectories")
    manifest = _intact(objects, f"{newest.object_key}/{MANIFEST}", newest.sha256)
    files = json.loads(manifest)["files"]
    if _TOKENIZER not in files:
        raise ConfigError(f"policy version {newest.version} of run {run_id} has no {_TOKENIZER} to read tokens with")
    data = _intact(objects, f"{newest.object_key}/{_TOKENIZER}", files[_TOKENIZER]["sha256"])
    return Tokenizer.from_str(data.decode())


def _intact(objects: ObjectStore, key: str, sha256: str) -> bytes:
    try:
        data = objects.get(key)
    except ObjectMissing as error:
        raise CorruptFolder(f"{key} is missing ({error})") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CorruptFolder(f"{key} is damaged: its sha256 should be {sha256}: got {found}")
    return data


def _number(value: Any) -> float | bool | None:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return float(value) if math.isfinite(float(value)) else None
