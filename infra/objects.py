"""The object store: bytes under keys, in a folder or on S3, through fsspec.

An object is complete or absent: bytes are complete before one PUT starts; in a folder they go to a temporary file that
is renamed. Listings are never cached and serve only deletion and upkeep; the ledger knows what there is. A remote store
that refuses for a while is asked again.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from infra import refusals
from infra.settings import Settings

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
"""Suffix of temporary files; one that stays behind belongs to a process that was killed."""

T = TypeVar("T")


class ObjectStoreError(RuntimeError):
    """The store could not do it; the message names the key."""


class Corrupt(RuntimeError):
    """What is stored is not what was written; the message names where it is, and its hash."""


class ObjectMissing(ObjectStoreError):
    """There is no object of this key."""


class StoreRefused(ObjectStoreError):
    """The store answers and does not let us in, or has no such bucket: waiting does not help."""


class BucketMissing(StoreRefused):
    """The store has no bucket of this name."""


class StoreFull(ObjectStoreError):
    """No space left; nothing was half-made."""


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing shows it."""

    key: str
    size: int
    modified_at: float
    """By the clock of the store; a file that was moved in keeps the time at which it was written."""

    @property
    def is_temporary(self) -> bool:
        """Whether it is a file in the making, or was left by a process that was killed."""
        return is_temporary(self.key)


class ObjectStore:
    """Objects under a folder or `s3://bucket/prefix`; safe to share between threads, not processes."""

    def __init__(self, url: str, *, endpoint_url: str | None = None, patience_s: float = 120.0) -> None:
        """Open ``url``; nothing is created or contacted before the first call.

        A call to S3 that fails is repeated for ``patience_s`` before it raises.
        """
        self.url = url
        self.patience_s = patience_s
        self._endpoint_url = endpoint_url
        self.is_folder = not url.startswith("s3://")
        self._root = str(Path(url).absolute()) if self.is_folder else url.removeprefix("s3://").rstrip("/")

    @classmethod
    def from_settings(cls, settings: Settings) -> ObjectStore:
        """The store of an installation."""
        return cls(settings.object_store, endpoint_url=settings.s3_endpoint_url)

    @property
    def _bucket(self) -> str:
        return self._root.partition("/")[0]

    @cached_property
    def _files(self) -> Any:
        if self.is_folder:
            return fsspec.filesystem("file")
        client = {"endpoint_url": self._endpoint_url} if self._endpoint_url else {}
        return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, client_kwargs=client)

    @cached_property
    def _refusals(self) -> tuple[type[Exception], ...]:
        if self.is_folder:
            return (OSError,)
        from aiohttp import ClientError
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

        return (OSError, BotoCoreError, ClientError)  # the last: an answer that breaks off while it is read

    def meet(self) -> None:
        """Make sure that the store answers and lets us in, for a person who waits and may have mistyped something.

        Raises:
            StoreRefused: wrong key, no right to use it, no such bucket.
            ObjectStoreError: it does not answer; said after some 6 s.
        """
        if not self.is_folder:
            # A listing is answered with a reason, where a question for one object is refused without a word.
            self._call("", lambda: self._files.call_s3("list_objects_v2", Bucket=self._bucket, MaxKeys=1), patience_s=0)

    def make_bucket(self) -> bool:
        """Create the bucket if there is none; whether it was created. A folder needs none."""
        try:
            self.meet()
        except BucketMissing:
            with suppress(FileExistsError):  # by somebody else, at this moment
                self._call("", lambda: self._files.mkdir(self._bucket))
            return True
        return False

    def put(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Store ``data`` whole under ``key``; an object that was there is replaced.

        Without ``durable`` a folder may lose the object in a power cut (never in a kill), which saves waiting for the
        disk.

        Raises:
            StoreFull: no space left.
            ObjectStoreError: the store refused.
        """
        if self.is_folder:
            self._into_place(key, lambda temporary: temporary.write_bytes(data), durable=durable)
        else:
            self._call(key, lambda: self._files.pipe_file(self._path(key), data))

    def put_file(self, key: str, source: Path, *, move: bool = False, durable: bool = True) -> None:
        """Store a complete file under ``key`` like `put`; ``move`` gives it away, which is free on the same disk."""
        if self.is_folder:
            bring = shutil.move if move else shutil.copyfile
            self._into_place(key, lambda temporary: bring(source, temporary), durable=durable)
            return
        self._call(key, lambda: self._files.put_file(str(source), self._path(key)))
        if move:
            source.unlink()

    def get(self, key: str) -> bytes:
        """All bytes of an object.

        Raises:
            ObjectMissing: there is none.
        """
        return self._call(key, lambda: self._files.cat_file(self._path(key)))

    def get_to_file(self, key: str, target: Path) -> None:
        """Download an object to ``target``, which is complete or absent."""
        temporary = _beside(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._call(key, lambda: self._files.get_file(self._path(key), str(temporary)))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def sync(self, keys: Iterable[str]) -> None:
        """Make objects durable that were put without; on S3 they are."""
        if not self.is_folder:
            return
        for key in keys:
            path = Path(self._path(key))
            self._call(key, lambda path=path: _sync(path))  # type: ignore[misc]
            self._call(key, lambda path=path: _sync(path.parent))  # type: ignore[misc]

    def local_path(self, key: str) -> Path | None:
        """Where the object (or the folder of objects) lies on this machine; None on S3."""
        return Path(self._path(key)) if self.is_folder else None

    def exists(self, key: str) -> bool:
        """Whether there is an object of this key; a store that does not answer raises, as everywhere."""
        with suppress(ObjectMissing):
            return bool(self._call(key, lambda: self._files.info(self._path(key))["type"] == "file"))
        return False

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        return int(self._call(key, lambda: self._files.info(self._path(key))["size"]))

    def delete(self, key: str) -> None:
        """Remove an object; none of this key is fine."""
        with suppress(ObjectMissing):
            self._call(key, lambda: self._files.rm_file(self._path(key)))

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object under ``prefix/``; none is fine."""
        if self.is_folder:
            with suppress(ObjectMissing):
                self._call(prefix, lambda: shutil.rmtree(self._path(prefix)))
            return
        for key in self.keys(prefix):
            self.delete(key)

    def keys(self, prefix: str) -> list[str]:
        """Keys of all objects under ``prefix/``, sorted: for upkeep, never as the truth."""
        return [found.key for found in self.listing(prefix)]

    def listing(self, prefix: str) -> list[StoredObject]:
        """All objects under ``prefix/`` by key, temporary files too: for upkeep, never as the truth."""
        if self.is_folder:
            return sorted(self._walk(Path(self._path(prefix))), key=lambda found: found.key)
        found = self._call(prefix, lambda: self._files.find(self._path(prefix), detail=True))
        return [
            StoredObject(self._key(path), int(info["size"]), info["LastModified"].timestamp())
            for path, info in sorted(found.items())
        ]

    def _walk(self, folder: Path) -> Iterator[StoredObject]:
        for directory, _, names in os.walk(folder):
            for name in names:
                path = Path(directory, name)
                with suppress(FileNotFoundError):  # a temporary one that has its name by now
                    info = path.stat()
                    yield StoredObject(self._key(str(path)), info.st_size, info.st_mtime)

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if key.startswith("/") or not key or any(part in ("", ".", "..") for part in parts):
            raise ObjectStoreError(f"an object key is relative and has no empty or dotted parts: got {key!r}")
        return f"{self._root}/{key}"

    def _into_place(self, key: str, bring: Callable[[Path], object], *, durable: bool) -> None:
        target = Path(self._path(key))
        temporary = _beside(target)

        def put() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                bring(temporary)
                if durable:
                    _sync(temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            if durable:
                _sync(target.parent)

        self._call(key, put)

    def _call(self, key: str, work: Callable[[], T], patience_s: float | None = None) -> T:
        patience_s = self.patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + (0.0 if self.is_folder else patience_s)
        delay = 0.2
        while True:
            try:
                return work()
            except self._refusals as error:
                refused = refusals.of_store(error, self.url, self._endpoint_url)
                if refused is not None:
                    missing = refusals.store_code(error) == "NoSuchBucket"
                    raise (BucketMissing if missing else StoreRefused)(refused) from error
                if isinstance(error, FileNotFoundError):
                    raise ObjectMissing(f"{self.url} has no object {key}") from error
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreFull(
                        f"no space left for {key} in {self.url}: what is stored is intact; make room and resume"
                    ) from error
                if time.monotonic() + delay > deadline:
                    raise ObjectStoreError(self._failure(key, error)) from error
                logger.warning("object store: %s: %s; trying again", key, error)
                time.sleep(delay)
                delay = min(2 * delay, 5.0)

    def _failure(self, key: str, error: Exception) -> str:
        if self.is_folder:
            return f"{self.url}: {key}: {error}"
        where, what = refusals.place(self.url, self._endpoint_url), f"{key}: {error}" if key else error
        return f"the object store {where} cannot be used ({what}): is it running, and is AWS_ENDPOINT_URL right?"


def is_temporary(key: str) -> bool:
    """Whether a key is that of a file in the making in a folder store."""
    name = key.rpartition("/")[2]
    return name.startswith(".") and name.endswith(PARTIAL)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
