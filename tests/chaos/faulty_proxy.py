"""A proxy before a server, over real sockets, that can be told to fail: refuse, break off, answer 503, or be slow."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from typing import Literal

Fault = Literal["none", "refuses", "answers 503", "is slow", "breaks off"]

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
SLOW_S = 0.15
"""What a slow server takes before it passes on a piece of a connection, in either direction."""
BREAKS_AFTER = 1500
"""Bytes of an answer that pass before a connection is broken off."""


class FaultyProxy:
    """Passes connections on to a port of this machine until told otherwise; every change ends the open ones."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._fault: Fault = "none"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.hit = 0
        """Connections that a fault met."""
        self._listener = self._listen(0)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def be(self, fault: Fault) -> None:
        """Behave like this from now on."""
        with self._lock:
            self._fault = fault
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self.be("none")
        self._listener.close()

    @staticmethod
    def _listen(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        listener.settimeout(0.1)
        return listener

    def _accept(self) -> None:
        while not self._closed:
            if self._fault == "refuses":
                self._listener.close()
                while self._fault == "refuses" and not self._closed:
                    time.sleep(0.02)
                self._listener = self._listen(self.port)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            connection.settimeout(None)
            threading.Thread(target=self._serve, args=(connection, self._fault), daemon=True).start()

    def _serve(self, connection: socket.socket, fault: Fault) -> None:
        self.hit += fault != "none"
        with connection, suppress(OSError):
            if fault == "answers 503":
                connection.recv(65536)
                connection.sendall(UNAVAILABLE)
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                with self._lock:
                    if fault != self._fault:
                        return
                    self._open |= {connection, server}
                try:
                    self._pass_on(connection, server, fault)
                finally:
                    with self._lock:
                        self._open -= {connection, server}

    @staticmethod
    def _pass_on(client: socket.socket, server: socket.socket, fault: Fault) -> None:
        answered = 0
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(65536)
                if not data:
                    return
                if fault == "is slow":
                    time.sleep(SLOW_S)
                if source is server:
                    answered += len(data)
                    if fault == "breaks off" and answered > BREAKS_AFTER:
                        client.sendall(data[: len(data) // 2])
                        return
                (server if source is client else client).sendall(data)
