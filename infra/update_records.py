"""What the learner saw and made of its tokens, per step: `runs/{run}/updates/{step}.parquet`.

One row per trajectory: its id and one list column per quantity (log-probabilities now, values before and after, …),
each as long as the trajectory. It feeds viewer and replay and is no part of the accounting.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from infra.objects import ObjectStore


def update_key(run_id: str, step: int) -> str:
    """Where a step's record lies in the object store."""
    return f"runs/{run_id}/updates/{step}.parquet"


def write_update_tokens(
    objects: ObjectStore, run_id: str, step: int, tokens: Mapping[str, Mapping[str, npt.ArrayLike]]
) -> None:
    """Store trajectory id → column → array of shape (T,); a record of the same step is replaced."""
    names = sorted({name for columns in tokens.values() for name in columns})
    arrays: dict[str, pa.Array] = {"trajectory_id": pa.array(list(tokens), type=pa.string())}
    for name in names:
        rows = [None if columns.get(name) is None else np.asarray(columns[name]) for columns in tokens.values()]
        arrays[name] = pa.array(rows)
    sink = io.BytesIO()
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in names if pa.types.is_floating(_item(arrays[name]))}
    pq.write_table(
        pa.table(arrays),
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding=split,
        write_statistics=False,
    )
    objects.put(update_key(run_id, step), sink.getvalue(), durable=False)


def read_update_tokens(objects: ObjectStore, run_id: str, step: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """The inverse of :func:`write_update_tokens`; columns that a trajectory lacks are left out.

    Raises:
        ObjectMissing: nothing was recorded for this step.
    """
    table = pq.read_table(io.BytesIO(objects.get(update_key(run_id, step))))
    names = [name for name in table.column_names if name != "trajectory_id"]
    records: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for index, trajectory_id in enumerate(table.column("trajectory_id").to_pylist()):
        cells = {name: table.column(name)[index] for name in names}
        records[trajectory_id] = {
            name: cell.values.to_numpy(zero_copy_only=False) for name, cell in cells.items() if cell.is_valid
        }
    return records


def _item(array: pa.Array) -> pa.DataType:
    return array.type.value_type
