"""Trajectory files: what messages carry beside their text, and files that an earlier version wrote."""

import io
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
from infra_fixtures import trajectory

from infra.trajectory_format import decode, encode
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Message, Purpose, Role, Trajectory

CALLS = [
    {"id": "abcde1234", "type": "function", "function": {"name": "python", "arguments": {"code": "é\n", "n": [1]}}}
]
SAID = (
    Message(Role.USER, "What is 2 × 3?"),
    Message(Role.ASSISTANT, "", {"tool_calls": CALLS}),
    Message(Role.TOOL, "6", {"name": "python", "tool_call_id": "abcde1234"}),
)


def one() -> Trajectory:
    return replace(trajectory(RolloutRequest("r", 3, 1, Purpose.TRAIN, "prompt-3")), messages=SAID)


def read(data: bytes) -> Trajectory:
    return decode(pq.ParquetFile(io.BytesIO(data)), [0])[0]


def test_what_templates_need_of_a_message_comes_back() -> None:
    """A rollout that goes on after a restart may have its history rendered again."""
    assert read(encode([one()])).messages == SAID


def test_files_of_before_messages_had_more_than_text_are_read() -> None:
    table = pq.read_table(io.BytesIO(encode([one()])))
    texts = [[{"role": str(m.role), "content": m.content} for m in SAID]]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    place = table.column_names.index("messages")
    old = table.set_column(place, "messages", pa.array(texts, kind)).drop_columns(["info"])
    sink = io.BytesIO()
    pq.write_table(old, sink)
    back = read(sink.getvalue())
    assert back.messages == tuple(Message(m.role, m.content) for m in SAID)
    assert back.token_ids.tolist() == one().token_ids.tolist()
    assert back.info == {}
