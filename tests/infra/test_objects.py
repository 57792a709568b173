"""Objects are complete or absent, in a folder and on S3."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError
from infra_fixtures import Places

from infra.objects import ObjectMissing, ObjectStore, ObjectStoreError, StoreFull


def test_an_object_is_stored_replaced_and_removed(objects: ObjectStore) -> None:
    objects.put("runs/a/x.bin", b"one")
    objects.put("runs/a/x.bin", b"three")
    assert objects.get("runs/a/x.bin") == b"three"
    assert (objects.exists("runs/a/x.bin"), objects.size("runs/a/x.bin")) == (True, 5)
    objects.delete("runs/a/x.bin")
    objects.delete("runs/a/x.bin")
    assert not objects.exists("runs/a/x.bin")
    with pytest.raises(ObjectMissing, match=r"runs/a/x\.bin"):
        objects.get("runs/a/x.bin")


def test_files_travel_both_ways(objects: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "weights"
    source.write_bytes(bytes(range(256)) * 100)
    objects.put_file("p/kept", source)
    objects.put_file("p/moved", source, move=True)
    assert not source.exists()
    objects.get_to_file("p/kept", tmp_path / "deep" / "back")
    assert (tmp_path / "deep" / "back").read_bytes() == bytes(range(256)) * 100
    assert objects.keys("p") == ["p/kept", "p/moved"]
    with pytest.raises(ObjectMissing):
        objects.get_to_file("p/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_listing_shows_what_another_process_just_put(places: Places, objects: ObjectStore) -> None:
    assert objects.keys("fresh") == []
    ObjectStore(places.object_store, endpoint_url=places.endpoint_url).put("fresh/a", b"1")
    assert objects.keys("fresh") == ["fresh/a"]


def test_a_listing_tells_size_and_time_and_shows_temporary_files(objects: ObjectStore) -> None:
    started = time.time()
    objects.put("fresh/b/2", b"22")
    objects.put("fresh/a", b"1")
    if (folder := objects.local_path("fresh")) is not None:
        (folder / ".a.0f.partial").write_bytes(b"333")
    found = {one.key: (one.size, one.is_temporary) for one in objects.listing("fresh")}
    left = {"fresh/.a.0f.partial": (3, True)} if objects.is_folder else {}
    assert found == left | {"fresh/a": (1, False), "fresh/b/2": (2, False)}
    assert list(found) == sorted(found)
    assert all(abs(one.modified_at - started) < 60 for one in objects.listing("fresh"))


def test_a_prefix_is_removed_with_all_it_holds(objects: ObjectStore) -> None:
    for key in ("runs/a/1", "runs/a/deep/2", "runs/ab/3"):
        objects.put(key, b"x")
    objects.delete_prefix("runs/a")
    objects.delete_prefix("runs/a")
    assert objects.keys("runs") == ["runs/ab/3"]


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a//b", "../a", "a/./b"])
def test_keys_cannot_leave_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(ObjectStoreError, match="relative"):
        ObjectStore(str(tmp_path)).put(key, b"x")


def test_a_full_disk_leaves_the_old_object_and_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(str(tmp_path))
    store.put("a/x", b"good")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match=r"a/x.*make room"):
        store.put("a/x", b"better")
    assert store.get("a/x") == b"good"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]


def test_a_remote_store_that_refuses_for_a_while_is_asked_again(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore("s3://sao/flaky", endpoint_url=s3_endpoint, patience_s=10.0)
    answers = [OSError("SlowDown"), OSError("InternalError")]
    put = store._files.pipe_file

    def flaky(path: str, data: bytes) -> None:
        if answers:
            raise answers.pop()
        put(path, data)

    monkeypatch.setattr(store._files, "pipe_file", flaky)
    store.put("x", b"1")
    assert store.get("x") == b"1"


def test_an_answer_that_breaks_off_is_asked_for_again(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore("s3://sao/broken-off", endpoint_url=s3_endpoint, patience_s=10.0)
    store.put("a", b"whole")
    failures = [ClientPayloadError("Response payload is not completed")]
    read = store._files.cat_file

    def breaks_off_once(path: str) -> bytes:
        if failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(store._files, "cat_file", breaks_off_once)
    assert store.get("a") == b"whole"
    assert not failures


def test_a_remote_store_that_stays_away_is_named(s3_endpoint: str) -> None:
    store = ObjectStore("s3://no-such-bucket/prefix", endpoint_url=s3_endpoint, patience_s=0.1)
    with pytest.raises(ObjectStoreError, match="no-such-bucket"):
        store.put("x", b"1")
