"""Parts of unfinished rollouts as objects: the rows of a part's pieces in Parquet, the rest in the file's metadata.

Nothing here knows which parts are wanted; the ledger does.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from infra.ledger import PartRow
from infra.objects import Corrupt, ObjectMissing, ObjectStore
from infra.trajectory_format import decode, encode
from sao_core.rollout.parts import RolloutPart

_NOTE = "rollout_part"


class CorruptPart(Corrupt):
    """A stored part that cannot be read as it was written; the message names key and hash."""


def write_part(objects: ObjectStore, worker: str, part: RolloutPart) -> PartRow:
    """Put a part as an object of its own; returns what the ledger records of it."""
    first = part.pieces[0]
    name = f"{first.request_number}-{first.attempt}-{part.number:04d}-{secrets.token_hex(4)}.parquet"
    key = f"runs/{first.run_id}/parts/{worker}/{name}"
    data = encode_part(part)
    objects.put(key, data)
    return PartRow(
        request_number=first.request_number,
        attempt=first.attempt,
        part=part.number,
        restorable=part.state is not None,
        object_key=key,
        sha256=hashlib.sha256(data).hexdigest(),
        num_tokens=part.num_tokens,
        num_action_tokens=part.num_action_tokens,
    )


def read_parts(objects: ObjectStore, rows: Sequence[PartRow]) -> tuple[RolloutPart, ...]:
    """The parts that ``rows`` describe, in that order.

    Raises:
        CorruptPart: an object is missing, or is not what was recorded.
    """
    return tuple(_read(objects, row) for row in rows)


def _read(objects: ObjectStore, row: PartRow) -> RolloutPart:
    where = f"part {row.part} of request {row.request_number} damaged: {row.object_key} (sha256 {row.sha256})"
    try:
        data = objects.get(row.object_key)
    except ObjectMissing as error:
        raise CorruptPart(f"{where}: {error}") from error
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != row.sha256:
        raise CorruptPart(f"{where}: sha256 is {sha256}")
    try:
        return decode_part(data)
    except (pa.ArrowException, OSError, ValueError, IndexError, KeyError) as error:
        raise CorruptPart(f"{where}: {error}") from error


def encode_part(part: RolloutPart) -> bytes:
    """The bytes of a part's object."""
    note = {"number": part.number, "turns": part.turns, "open_tokens": part.open_tokens, "state": part.state}
    return encode(part.pieces, {_NOTE: json.dumps(note)})


def decode_part(data: bytes) -> RolloutPart:
    """The inverse of :func:`encode_part`."""
    with pq.ParquetFile(io.BytesIO(data)) as file:
        note = json.loads((file.metadata.metadata or {})[_NOTE.encode()])
        pieces = decode(file, range(file.metadata.num_rows))
    return RolloutPart(pieces=tuple(pieces), **note)
