"""Runs one program in a fresh folder and makes sure that nothing of it outlives its worker. Run as a script.

    worker ── {"argv": …, "task": …} ──▶ guard ── starts the program, reads what it prints
    worker ── end of file ─────────────▶ guard: kills it with all that it started
    worker ◀── {"exit_code": …} ──────── guard, once all is gone; then it removes the folder and leaves

The end of file also comes when the worker dies, however it dies. Imports the standard library only: one starts per
rollout.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

TAIL_BYTES = 16 * 2**10
"""How much of the end of each output is kept."""
RESULT_BYTES = 2**20
KILL_S = 5.0
"""Longest that killed processes may take to be gone."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def guard() -> None:
    """Serve one program."""
    start = json.loads(sys.stdin.buffer.readline() or b"null")
    if start is None:
        return
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    folder = tempfile.mkdtemp(prefix="sao-agent-")
    try:
        report = _run(start, folder)
        with suppress(OSError):  # the worker is gone
            os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")
            os.close(sys.stdout.fileno())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(start: dict[str, Any], folder: str) -> dict[str, Any]:
    task, result = os.path.join(folder, "task.json"), os.path.join(folder, "result.json")
    with open(task, "w", encoding="utf-8") as file:
        json.dump(start["task"], file, ensure_ascii=False)
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        program = subprocess.Popen(
            start["argv"],
            cwd=folder,
            env={**os.environ, "SAO_TASK": task, "SAO_RESULT": result},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_the_guard,
        )
    except (OSError, ValueError) as error:
        return {"problem": f"{start['argv'][0]}: {error.strerror if isinstance(error, OSError) else error}"}
    outputs = {"stdout": program.stdout, "stderr": program.stderr}
    tails = dict.fromkeys(outputs, b"")
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.buffer, selectors.EVENT_READ, "worker")
    selector.register(awake, selectors.EVENT_READ, "child")
    for name, pipe in outputs.items():
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, name)
    exit_code = None
    while exit_code is None:
        ready = [key for key, _ in selector.select()]
        for key in ready:
            if key.data in tails and not _read(key, tails):
                selector.unregister(key.fileobj)
        if any(key.data == "worker" for key in ready):
            break
        if any(key.data == "child" for key in ready):
            with suppress(BlockingIOError):
                awake.recv(4096)
            exit_code = _ended(program.pid)
    _kill(program.pid)
    for key in list(selector.get_map().values()):
        while key.data in tails and _read(key, tails):
            pass
    shown = {name: tail.decode("utf-8", "replace") for name, tail in tails.items()}
    return {"exit_code": exit_code, "result": _result(result), **shown}


def _read(key: selectors.SelectorKey, tails: dict[str, bytes]) -> bool:
    """Read some output, keep its end; False if there is none now, or never again."""
    try:
        data = os.read(key.fd, 65536)
    except BlockingIOError:
        return False
    tails[key.data] = (tails[key.data] + data)[-TAIL_BYTES:]
    return bool(data)


def _ended(pid: int) -> int | None:
    """The exit code of the program, negative for a signal; it stays a zombie, so that its group is nobody else's."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kill(pid: int) -> None:
    """Kill the program's group, then what left the group: all of that is, or becomes, a child of this process."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _children() -> list[int]:
    """Direct children of this process, as far as the system tells."""
    mine, found = str(os.getpid()), []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    if file.read().rpartition(")")[2].split()[1] == mine:
                        found.append(int(name))
    return found


def _result(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(RESULT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _die_with_the_guard() -> None:
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _control(option: int, value: int) -> None:
    """Linux only; elsewhere the program's own group has to do."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    guard()
