"""What an environment left of a rollout comes back as it was; files of earlier versions have no column of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pyarrow.parquet as pq
from infra_fixtures import trajectory

from infra.trajectory_format import decode, encode
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Purpose

REQUEST = RolloutRequest("run", 0, 1, Purpose.EVALUATE, "prompt")
INFO = {"patch": "--- a\n+++ b “ä” \ud800\n", "tests": 3, "share": 0.25, "complete": False}


def test_info_survives_storage_and_none_costs_nothing() -> None:
    stored = [trajectory(REQUEST, info=INFO), trajectory(REQUEST)]
    file = pq.ParquetFile(io.BytesIO(encode(stored)))
    assert [found.info for found in decode(file, [0, 1])] == [INFO, {}]
    column = pq.read_table(io.BytesIO(encode(stored)), columns=["info"]).column("info").to_pylist()
    assert json.loads(column[0])["tests"] == 3
    assert column[1] is None


def test_files_of_earlier_versions_are_read() -> None:
    table = pq.read_table(io.BytesIO(encode([trajectory(REQUEST, info=INFO)]))).drop_columns(["info"])
    old = io.BytesIO()
    pq.write_table(table, old)
    (found,) = decode(pq.ParquetFile(io.BytesIO(old.getvalue())), [0])
    assert found.info == {}
    assert found.messages == replace(trajectory(REQUEST), info=INFO).messages
