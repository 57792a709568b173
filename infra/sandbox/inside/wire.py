"""The frames between the worker and a box: one line of JSON that says how long the blobs are that follow it.

Blocking, for the inside; the worker reads the same frames with :class:`Reader` from its event loop.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

HEADER_BYTES = 1 << 20
"""Longest first line that is believed."""

Frame = tuple[dict[str, Any], list[bytes]]


class Garbage(ValueError):
    """What came is no frame, or larger than agreed."""


def encode(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """One frame."""
    line = json.dumps({**header, "blobs": [len(blob) for blob in blobs]})
    return b"".join([line.encode(), b"\n", *blobs])


class Reader:
    """Takes bytes as they come and gives whole frames."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._header: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises :class:`Garbage`."""
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if self._header is None:
            end = self._buffer.find(b"\n")
            if end < 0:
                if len(self._buffer) > HEADER_BYTES:
                    raise Garbage("a header that does not end")
                return None
            self._header = _header(bytes(self._buffer[:end]), self._most_bytes)
            del self._buffer[: end + 1]
        sizes = self._header["blobs"]
        if len(self._buffer) < sum(sizes):
            return None
        blobs = []
        for size in sizes:
            blobs.append(bytes(self._buffer[:size]))
            del self._buffer[:size]
        header, self._header = self._header, None
        return header, blobs


def receive(connection: socket.socket) -> Frame | None:
    """The next frame, waited for; None once the other side is gone. The other side is trusted."""
    reader = Reader(1 << 40)
    while data := connection.recv(1 << 16):
        for frame in reader.feed(data):
            return frame
    return None


def _header(line: bytes, most_bytes: int) -> dict[str, Any]:
    try:
        header = json.loads(line)
        sizes = header["blobs"]
        good = all(type(size) is int and size >= 0 for size in sizes)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Garbage(f"no header: {line[:80]!r}") from error
    if not good or sum(sizes) > most_bytes:
        raise Garbage(f"blobs of {sizes} bytes, {most_bytes} allowed")
    return header
