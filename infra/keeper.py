"""Runs a service for as long as any process uses it, then ends it and whatever it started.

A user holds a shared lock on the lock file, which the kernel drops when the user ends, however it ends. The keeper
leaves when it gets the lock exclusively, when its service has died, or on SIGTERM. This file is run as a script.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.25


def keep(lock_file: Path, port_file: Path, stop_grace_s: float, command: list[str]) -> None:
    """Run ``command`` in a session of its own until nobody holds ``lock_file``; removes ``port_file`` first.

    A service that has not left ``stop_grace_s`` after SIGTERM is killed with its group.
    The lock is held until the service is gone: who wants to start the next one waits for that.
    """
    asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    with open(lock_file, "ab") as lock:
        service = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        while service.poll() is None and not asked_to_stop:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_S)
        port_file.unlink(missing_ok=True)
        service.terminate()
        deadline = time.monotonic() + stop_grace_s
        while service.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(service.pid, signal.SIGKILL)
        service.wait()


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
