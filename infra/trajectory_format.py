"""How trajectories lie in Parquet (zstd): one row per trajectory, columns named as the fields of `Trajectory`.

Arrays are list columns, log-probabilities exact to the bit: their bytes are split by significance before compression,
which costs about 5 bytes per token in all. The sha256 of a row covers its arrays. Nothing here touches a store.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sao_core.trajectory import (
    ARRAY_FIELDS,
    SCALAR_FIELDS,
    Message,
    Outcome,
    Purpose,
    Role,
    Sampling,
    Trajectory,
    Turn,
)

ARRAY_TYPES: dict[str, tuple[pa.DataType, npt.DTypeLike]] = {
    "token_ids": (pa.int32(), np.int32),
    "action_mask": (pa.bool_(), np.bool_),
    "behavior_logprobs": (pa.float32(), np.float32),
    "policy_versions": (pa.int32(), np.int32),
    "rewards": (pa.float32(), np.float32),
}

SCALAR_TYPES: dict[str, pa.DataType] = {
    "trajectory_id": pa.string(),
    "run_id": pa.string(),
    "request_number": pa.int64(),
    "attempt": pa.int32(),
    "purpose": pa.string(),
    "prompt_key": pa.string(),
    "score": pa.float64(),
    "outcome": pa.string(),
    "stop_reason": pa.string(),
    "segment": pa.int32(),
    "num_segments": pa.int32(),
    "group": pa.int64(),
    "turns": pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32()), ("stop", pa.int32())])),
    "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("extra", pa.string())])),
    "sampling": pa.struct(
        [("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int32()), ("greedy", pa.bool_())]
    ),
    "on_swap": pa.string(),
    "renderer_hash": pa.string(),
    "environment": pa.string(),
    "environment_version": pa.string(),
    "environment_seed": pa.int64(),
    "difficulty": pa.string(),
    "reward_parts": pa.map_(pa.string(), pa.float64()),
    "timings": pa.map_(pa.string(), pa.float64()),
    "info": pa.string(),
}

SCHEMA = pa.schema(
    [
        *((name, SCALAR_TYPES[name]) for name in SCALAR_FIELDS),
        *((name, pa.list_(ARRAY_TYPES[name][0])) for name in ARRAY_FIELDS),
    ]
)

SPLIT = {"token_ids.list.element": "BYTE_STREAM_SPLIT", "behavior_logprobs.list.element": "BYTE_STREAM_SPLIT"}
DICTIONARIES = ["run_id", "purpose", "outcome", "stop_reason", "on_swap", "renderer_hash", "environment"]
REPEATING = ["policy_versions.list.element", "rewards.list.element"]
ROW_GROUP_ROWS = 64
"""Rows that are decoded together when one of them is read."""


def row_sha256(trajectory: Trajectory) -> str:
    """sha256 over the arrays of a trajectory in the order of `ARRAY_FIELDS`, each as little-endian bytes."""
    digest = hashlib.sha256()
    for name in ARRAY_FIELDS:
        array: npt.NDArray[Any] = getattr(trajectory, name)
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def encode(trajectories: Sequence[Trajectory], notes: Mapping[str, str] | None = None) -> bytes:
    """The complete bytes of a Parquet file with one row per trajectory, in order; ``notes`` go to its metadata."""
    columns: list[pa.Array] = [
        pa.array([_stored(t, name) for t in trajectories], type=SCALAR_TYPES[name]) for name in SCALAR_FIELDS
    ]
    offsets = np.cumsum([0, *(t.num_tokens for t in trajectories)], dtype=np.int32)
    for name in ARRAY_FIELDS:
        values = np.concatenate([getattr(t, name) for t in trajectories])
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(values, type=ARRAY_TYPES[name][0])))
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        compression_level=3,
        use_dictionary=[*DICTIONARIES, *REPEATING],
        column_encoding=SPLIT,
        data_page_version="2.0",
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), ROW_GROUP_ROWS)
        if notes:
            writer.add_key_value_metadata(dict(notes))
    return sink.getvalue()


def decode(file: pq.ParquetFile, rows: Sequence[int]) -> list[Trajectory]:
    """The trajectories in ``rows`` of a file, in that order; only their row groups are read.

    Raises:
        IndexError: the file has no such row.
        pyarrow.ArrowException, OSError: the file is damaged.
    """
    groups = sorted({row // ROW_GROUP_ROWS for row in rows})
    if rows and max(rows) >= file.metadata.num_rows:
        raise IndexError(f"no row {max(rows)} of {file.metadata.num_rows}")
    tables = {group: file.read_row_group(group) for group in groups}
    return [_trajectory(tables[row // ROW_GROUP_ROWS].slice(row % ROW_GROUP_ROWS, 1)) for row in rows]


def _trajectory(row: pa.Table) -> Trajectory:
    there = set(row.column_names)  # files of earlier versions have no `info`, and messages without `extra`
    values: dict[str, Any] = {name: row.column(name)[0].as_py() for name in SCALAR_FIELDS if name in there}
    for name in ARRAY_FIELDS:
        array = row.column(name)[0].values.to_numpy(zero_copy_only=False)
        values[name] = np.array(array, dtype=ARRAY_TYPES[name][1])
    values["purpose"] = Purpose(values["purpose"])
    values["outcome"] = Outcome(values["outcome"])
    values["turns"] = tuple(Turn(Role(t["role"]), t["start"], t["stop"]) for t in values["turns"])
    values["messages"] = tuple(
        Message(Role(m["role"]), m["content"], json.loads(m.get("extra") or "{}")) for m in values["messages"]
    )
    values["sampling"] = Sampling(**values["sampling"])
    values["reward_parts"] = dict(values["reward_parts"])
    values["timings"] = dict(values["timings"])
    values["info"] = json.loads(values.get("info") or "{}")
    return Trajectory(**values)


def _stored(trajectory: Trajectory, name: str) -> Any:
    """A field as its column takes it; what an environment or a template needs is JSON, so that it may be anything."""
    value = getattr(trajectory, name)
    if name == "info":
        return json.dumps(dict(value)) if value else None
    if name == "messages":
        return [
            {"role": m.role, "content": m.content, "extra": json.dumps(dict(m.extra)) if m.extra else None}
            for m in value
        ]
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Sampling):
        return asdict(value)
    if isinstance(value, tuple):
        return [asdict(item) for item in value]
    return dict(value) if hasattr(value, "items") else value
