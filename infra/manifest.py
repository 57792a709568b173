"""Folders in the object store: files first, `manifest.json` with their sha256 last, so complete or absent.

The sha256 of the manifest stands in the ledger and thus proves every file. Policies and checkpoints are such folders.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from infra.objects import Corrupt, ObjectMissing, ObjectStore

MANIFEST = "manifest.json"


class CorruptFolder(Corrupt):
    """A stored folder that is incomplete or damaged; the message names path and hash."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a stored folder."""

    path: str
    """Relative to the folder, with slashes."""
    size: int
    sha256: str


def describe(folder: Path) -> list[FileEntry]:
    """Every file of a local folder, by path; a manifest that lies there is left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return [FileEntry(p.relative_to(folder).as_posix(), p.stat().st_size, file_sha256(p)) for p in files]


def manifest_bytes(entries: list[FileEntry]) -> bytes:
    """The manifest: the same files give the same bytes."""
    files = {entry.path: {"size": entry.size, "sha256": entry.sha256} for entry in entries}
    return json.dumps({"files": files}, indent=1, sort_keys=True).encode()


def attempt_key(key: str, attempt: int | None) -> str:
    """The key of a folder that an attempt of a run stores: no other attempt writes there, or removes what is there."""
    return key if attempt is None else f"{key}-{attempt}"


def put_folder(objects: ObjectStore, key: str, folder: Path, *, move: bool = False, durable: bool = True) -> str:
    """Store ``folder`` under ``key/``, manifest last; returns the manifest's sha256.

    What lay there before (left by a process that was killed) is replaced. ``move`` gives the files away. Without
    ``durable`` a power cut, never a kill, may damage it; the hashes tell.
    """
    entries = describe(folder)
    manifest = manifest_bytes(entries)
    delete_folder(objects, key)
    for entry in entries:
        objects.put_file(f"{key}/{entry.path}", folder / entry.path, move=move, durable=durable)
    objects.put(f"{key}/{MANIFEST}", manifest, durable=durable)
    return hashlib.sha256(manifest).hexdigest()


def fetch_folder(objects: ObjectStore, key: str, sha256: str, cache: Path) -> Path:
    """A local folder with the files of ``key/``, every hash checked; in place if the store is a folder.

    A remote folder is downloaded to ``cache / sha256``; what is there already and intact is used.

    Raises:
        CorruptFolder: the manifest is missing or not the recorded one, or a file is missing or damaged.
    """
    entries = _read_manifest(objects, key, sha256)
    local = objects.local_path(key)
    folder = local if local is not None else cache / sha256
    for entry in entries:
        path = folder / entry.path
        if local is None and not _intact(path, entry):
            try:
                objects.get_to_file(f"{key}/{entry.path}", path)
            except ObjectMissing as error:
                raise CorruptFolder(f"{key} is incomplete: {entry.path} is missing ({error})") from error
        if not _intact(path, entry):
            found = _sha256_now(path)
            raise CorruptFolder(f"{key}/{entry.path} is damaged: its sha256 should be {entry.sha256}: got {found}")
    return folder


def sync_folder(objects: ObjectStore, key: str, sha256: str) -> None:
    """Make a folder durable that was put without."""
    paths = [entry.path for entry in _read_manifest(objects, key, sha256)]
    objects.sync(f"{key}/{path}" for path in (*paths, MANIFEST))


def delete_folder(objects: ObjectStore, key: str) -> None:
    """Remove a stored folder, its manifest first."""
    objects.delete(f"{key}/{MANIFEST}")
    objects.delete_prefix(key)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(objects: ObjectStore, key: str, sha256: str) -> list[FileEntry]:
    try:
        data = objects.get(f"{key}/{MANIFEST}")
    except ObjectMissing as error:
        raise CorruptFolder(f"{key} is incomplete: it has no {MANIFEST} ({error})") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CorruptFolder(f"{key}/{MANIFEST} is damaged: its sha256 should be {sha256}: got {found}")
    files = json.loads(data)["files"]
    return [FileEntry(path, entry["size"], entry["sha256"]) for path, entry in files.items()]


def _intact(path: Path, entry: FileEntry) -> bool:
    return path.is_file() and _sha256_now(path) == entry.sha256


def _sha256_now(path: Path) -> str:
    """Of a file that retention may remove at any moment."""
    try:
        return file_sha256(path)
    except FileNotFoundError:
        return "no file"
