"""Policies and checkpoints as folders: manifest last, every hash checked, nothing removed that is needed."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from infra_fixtures import LEASE_S, TRAIN, Places, make, prompts, train

from infra.checkpoints import CheckpointStore
from infra.ledger import Fenced, Ledger, LedgerError
from infra.manifest import MANIFEST, CorruptFolder, fetch_folder, put_folder
from infra.objects import ObjectStore, ObjectStoreError
from infra.policy_store import PolicyGone, PolicyStore


def folder(path: Path, text: str = "weights") -> Path:
    (path / "critic").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(text.encode() * 1000)
    (path / "config.json").write_text('{"vocab_size": 512}')
    (path / "critic" / "head.safetensors").write_bytes(b"head")
    return path


@pytest.fixture
def policies(objects: ObjectStore, ledger: Ledger, places: Places) -> PolicyStore:
    return PolicyStore(objects, ledger, places.cache)


@pytest.fixture
def checkpoints(objects: ObjectStore, ledger: Ledger, places: Places, run: str) -> CheckpointStore:
    return CheckpointStore(objects, ledger, run, places.cache, keep=2)


def test_a_policy_travels_whole(policies: PolicyStore, ledger: Ledger, run: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "p")
    stored = policies.put(run, 1, source)
    assert stored.object_key == f"runs/{run}/policies/1"
    ledger.add_policy(run, stored, step=0, parent_version=0)
    feed = policies.feed(run)
    assert feed.newest() == 1
    fetched = feed.fetch(1)
    assert (fetched / "model.safetensors").read_bytes() == b"weights" * 1000
    assert (fetched / "critic" / "head.safetensors").read_bytes() == b"head"
    assert source.exists()
    manifest = json.loads(policies.objects.get(f"{stored.object_key}/{MANIFEST}"))
    assert manifest["files"]["model.safetensors"] == {
        "size": 7000,
        "sha256": hashlib.sha256(b"weights" * 1000).hexdigest(),
    }
    assert stored.sha256 == hashlib.sha256(policies.objects.get(f"{stored.object_key}/{MANIFEST}")).hexdigest()


def test_the_same_weights_have_the_same_hash(objects: ObjectStore, tmp_path: Path) -> None:
    one = put_folder(objects, "a", folder(tmp_path / "1"))
    same = put_folder(objects, "b", folder(tmp_path / "2"), move=True)
    other = put_folder(objects, "c", folder(tmp_path / "3", "others"))
    assert one == same != other
    assert not (tmp_path / "2" / "model.safetensors").exists()


def test_the_manifest_comes_last_and_goes_first(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_folder(objects, "p", folder(tmp_path / "1"))
    put_file = objects.put_file

    def dies(key: str, source: Path, **more: Any) -> None:
        if key.endswith("model.safetensors"):
            raise ObjectStoreError("killed here")
        put_file(key, source, **more)

    monkeypatch.setattr(objects, "put_file", dies)
    with pytest.raises(ObjectStoreError, match="killed"):
        put_folder(objects, "p", folder(tmp_path / "2", "newer"))
    assert not objects.exists(f"p/{MANIFEST}")


@pytest.mark.parametrize("damage", ["no manifest", "other manifest", "missing file", "cut file", "changed file"])
def test_a_damaged_folder_is_named_with_path_and_hash(
    objects: ObjectStore, places: Places, tmp_path: Path, damage: str
) -> None:
    sha256 = put_folder(objects, "p", folder(tmp_path / "1"))
    where = {
        "no manifest": "no manifest.json",
        "other manifest": "manifest.json is damaged",
        "missing file": "model.safetensors",
        "cut file": "model.safetensors is damaged",
        "changed file": "model.safetensors is damaged",
    }
    if damage == "no manifest":
        objects.delete(f"p/{MANIFEST}")
    elif damage == "other manifest":
        objects.put(f"p/{MANIFEST}", b'{"files": {}}')
    elif damage == "missing file":
        objects.delete("p/model.safetensors")
    else:
        objects.put("p/model.safetensors", b"weights" * 999 if damage == "cut file" else b"weighty" * 1000)
    with pytest.raises(CorruptFolder, match=where[damage]):
        fetch_folder(objects, "p", sha256, places.cache)


def test_a_damaged_download_is_fetched_again(s3_endpoint: str, tmp_path: Path) -> None:
    objects = ObjectStore("s3://sao/downloads", endpoint_url=s3_endpoint)
    sha256 = put_folder(objects, "p", folder(tmp_path / "1"))
    fetched = fetch_folder(objects, "p", sha256, tmp_path / "cache")
    (fetched / "model.safetensors").write_bytes(b"scratched")
    assert fetch_folder(objects, "p", sha256, tmp_path / "cache") == fetched
    assert (fetched / "model.safetensors").read_bytes() == b"weights" * 1000


def test_pruned_policies_lose_their_files_and_say_so(
    policies: PolicyStore, ledger: Ledger, run: str, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        stored = policies.put(run, version, folder(tmp_path / str(version), f"v{version}"))
        ledger.add_policy(run, stored, step=version, parent_version=version - 1)
    ledger.heartbeat(run, "w", "generating", 2, "host", 1, LEASE_S, purposes=TRAIN)
    assert sorted(policies.prune(run, keep=1, silent_s=60.0)) == [0, 1]
    assert policies.objects.keys(f"runs/{run}/policies/1") == []
    assert policies.fetch(run, 2).exists()
    with pytest.raises(PolicyGone, match="version 1"):
        policies.fetch(run, 1)
    with pytest.raises(LedgerError, match="no policy version 9"):
        policies.fetch(run, 9)


# --- checkpoints --------------------------------------------------------------------------------


def steps(ledger: Ledger, run: str, count: int) -> None:
    ledger.issue(run, prompts(count))
    make(ledger, run, count)
    for step in range(1, count + 1):
        train(ledger, run, step, 1)


def test_a_checkpoint_is_announced_once_complete_and_its_folder_is_given_away(
    checkpoints: CheckpointStore, ledger: Ledger, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints.latest() is None
    steps(ledger, run, 1)
    gate = threading.Event()
    put = checkpoints._objects.put

    def slow(key: str, data: bytes, **more: Any) -> None:
        gate.wait(30)
        put(key, data, **more)

    monkeypatch.setattr(checkpoints._objects, "put", slow)
    checkpoints.save(1, folder(tmp_path / "c"))
    assert ledger.latest_checkpoint(run) is None
    gate.set()
    checkpoints.flush()
    assert not (tmp_path / "c").exists()
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[0] == 1
    assert (latest[1] / "model.safetensors").read_bytes() == b"weights" * 1000
    assert [u.checkpoint_key for u in ledger.updates_since(run, 0)] == [f"runs/{run}/checkpoints/1"]


def test_the_last_good_checkpoint_is_deleted_only_after_the_next_is_complete(
    objects: ObjectStore, ledger: Ledger, places: Places, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(objects, ledger, run, places.cache, keep=1)
    steps(ledger, run, 3)
    store.save(1, folder(tmp_path / "1", "first"))
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(objects, "put", lambda *_, **__: (_ for _ in ()).throw(ObjectStoreError("store is away")))
        store.save(2, folder(tmp_path / "2", "second"))
        with pytest.raises(ObjectStoreError, match="store is away"):
            store.flush()
    latest = store.latest()
    assert latest is not None
    assert latest[0] == 1
    store.save(3, folder(tmp_path / "3", "third"))
    store.close()
    assert [record.step for record in ledger.checkpoints(run)] == [3]
    assert objects.keys(f"runs/{run}/checkpoints/1") == []


def test_a_named_checkpoint_stays_when_newer_ones_replace_it(
    objects: ObjectStore, ledger: Ledger, places: Places, run: str, tmp_path: Path
) -> None:
    store = CheckpointStore(objects, ledger, run, places.cache, keep=1)
    steps(ledger, run, 4)
    for step in (1, 2, 3):
        store.save(step, folder(tmp_path / str(step), f"step {step}"))
        store.flush()
        if step == 2:
            ledger.name_checkpoint(run, 2, "best")
    assert [(record.step, record.name) for record in ledger.checkpoints(run)] == [(3, None), (2, "best")]
    assert store.fetch(ledger.checkpoints(run)[1]).joinpath("model.safetensors").is_file()
    with pytest.raises(LedgerError, match=r"step 2 of run .* is called best already"):
        ledger.name_checkpoint(run, 3, "best")
    with pytest.raises(LedgerError, match="no checkpoint of step 1; there are: 2, 3"):
        ledger.name_checkpoint(run, 1, "first")
    ledger.name_checkpoint(run, 2, None)
    store.save(4, folder(tmp_path / "4", "step 4"))
    store.close()
    assert [record.step for record in ledger.checkpoints(run)] == [4]
    assert objects.keys(f"runs/{run}/checkpoints/2") == []


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    checkpoints: CheckpointStore, ledger: Ledger, run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps(ledger, run, 2)
    for step in (1, 2):
        checkpoints.save(step, folder(tmp_path / str(step), f"step {step}"))
    checkpoints.close()
    checkpoints._objects.put(f"runs/{run}/checkpoints/2/model.safetensors", b"scratched")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[0] == 1
    assert "checkpoints/2/model.safetensors is damaged" in caplog.text
    checkpoints._objects.delete(f"runs/{run}/checkpoints/1/{MANIFEST}")
    with pytest.raises(CorruptFolder, match="steps 2, 1 are damaged"):
        checkpoints.latest()


def test_a_complete_checkpoint_is_not_written_over(
    checkpoints: CheckpointStore, ledger: Ledger, run: str, tmp_path: Path
) -> None:
    checkpoints.save(0, folder(tmp_path / "a", "good"))
    checkpoints.save(0, folder(tmp_path / "b", "again"))
    checkpoints.close()
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest[1] / "model.safetensors").read_bytes() == b"good" * 1000
    assert not (tmp_path / "b").exists()


def test_a_superseded_checkpoint_is_replaced_and_its_leftovers_go(
    checkpoints: CheckpointStore, ledger: Ledger, run: str, tmp_path: Path
) -> None:
    steps(ledger, run, 2)
    for step in (1, 2):
        checkpoints.save(step, folder(tmp_path / str(step), f"old {step}"))
    checkpoints.flush()
    ledger.rewind(run, 1)
    train(ledger, run, 2, 1)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model.safetensors").write_bytes(b"new")
    checkpoints.save(2, tmp_path / "new")
    checkpoints.close()
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest[0], [path.name for path in latest[1].iterdir() if path.name != MANIFEST]) == (
        2,
        ["model.safetensors"],
    )


def test_a_learner_of_an_earlier_attempt_cannot_announce_a_checkpoint(
    objects: ObjectStore, ledger: Ledger, places: Places, run: str, tmp_path: Path
) -> None:
    store = CheckpointStore(objects, ledger, run, places.cache, keep=1, attempt=1)
    ledger.begin_attempt(run)
    store.save(0, folder(tmp_path / "a"))
    with pytest.raises(Fenced):
        store.close()
    assert ledger.checkpoints(run) == []


def test_a_learner_that_stalls_while_storing_a_checkpoint_cannot_harm_that_of_its_successor(
    objects: ObjectStore,
    ledger: Ledger,
    places: Places,
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalled = CheckpointStore(objects, ledger, run, places.cache, keep=1, attempt=1)
    successor = CheckpointStore(objects, ledger, run, places.cache, keep=1, attempt=ledger.begin_attempt(run))
    successor.save(0, folder(tmp_path / "new", "by the successor"))
    successor.close()
    with monkeypatch.context() as patch:  # it looked before it stalled
        patch.setattr(ledger, "require_attempt", lambda *_: None)
        patch.setattr(ledger, "checkpoints", lambda _: [])
        stalled.save(0, folder(tmp_path / "old", "by the one that stalled"))
        with pytest.raises(Fenced):
            stalled.close()
    latest = successor.latest()
    assert latest is not None
    assert (latest[1] / "model.safetensors").read_bytes().startswith(b"by the successor")


def test_a_superseded_checkpoint_of_an_earlier_attempt_goes_when_another_takes_its_place(
    objects: ObjectStore, ledger: Ledger, places: Places, run: str, tmp_path: Path
) -> None:
    first = CheckpointStore(objects, ledger, run, places.cache, keep=2, attempt=1)
    steps(ledger, run, 2)
    for step in (1, 2):
        first.save(step, folder(tmp_path / str(step), f"old {step}"))
    first.close()
    attempt = ledger.begin_attempt(run)
    ledger.rewind(run, 1)
    train(ledger, run, 2, 1)
    second = CheckpointStore(objects, ledger, run, places.cache, keep=2, attempt=attempt)
    second.save(2, folder(tmp_path / "new", "new 2"))
    second.close()
    assert [record.object_key for record in ledger.checkpoints(run)] == [
        f"runs/{run}/checkpoints/2-{attempt}",
        f"runs/{run}/checkpoints/1-1",
    ]
    assert objects.keys(f"runs/{run}/checkpoints/2-1") == []


def test_what_a_process_remembers_of_policies_does_not_grow_with_the_run(
    policies: PolicyStore, ledger: Ledger, run: str, tmp_path: Path
) -> None:
    for version in range(1, 8):
        ledger.add_policy(run, policies.put(run, version, folder(tmp_path / str(version))), step=0)
        policies.fetch(run, version)
        policies.prune(run, keep=2, silent_s=0.0)
    known = [folder for folder in policies._checked.values() if folder.exists()]
    assert len(policies._checked) <= len(known) + 1
