"""Process 1 of a box: waits for one job, starts it as a stranger, watches what it uses, ends it, reports, exits.

    worker ── job, marks, end of file ──▶ this ── forks ──▶ program or session and all that they start
           ◀── up, started, done ────────      ◀── /proc ──

The worker's end of file means the end, whatever is under way: when this process exits, its namespace dies with it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from infra.sandbox.inside import cells, collect, enter, kernel, program, seccomp, watch, wire

TICK_S = 0.025
"""How often it looks at what the program uses."""
FOLDER = "/tmp/work"
OPEN_FILES = 256
_OF_FILES = 0o755


@dataclass(frozen=True)
class Setup:
    """How this box was made; the worker passes it on the command line."""

    control: int
    cells: int
    stdout: int
    stderr: int
    isolated: bool
    separate_user: bool
    """The program gets a user of its own, which takes real root; else it shares this process's."""
    plan: list[list[str]] | None
    """What to mount, if this process has to make its own namespaces."""
    below_tmp: list[str]
    """What is seen below /tmp, and must still be once the program's disk lies there: a Python installed in it."""


@dataclass(frozen=True)
class _Watched:
    main: int
    descriptor: int
    limits: dict[str, Any]
    isolated: bool


def main() -> None:
    """Serve one job, then exit."""
    setup = Setup(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if setup.isolated:
        kernel.die_with_parent()
    if setup.plan is not None:
        enter.enter(setup.plan, setup.separate_user, keep=(setup.control, setup.cells, setup.stdout, setup.stderr))
    control = socket.socket(fileno=setup.control)
    if not setup.isolated:  # it must outlive the worker for the moment that it takes to end the program and clean up
        kernel.adopt_orphans()
    filter_steps = seccomp.program(seccomp.machine())
    kernel.set_dumpable(False)
    control.sendall(wire.encode({"event": "up"}))
    frame = wire.receive(control)
    if frame is None:
        os._exit(0)
    job, blobs = frame
    folder = _make_folder(setup, job, blobs)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    child = os.fork()
    if child == 0:
        _be_the_program(setup, job, blobs[-1], folder, filter_steps)
    try:
        _serve(setup, job, control, child, at)
    finally:
        if not setup.isolated:
            _kill_all(setup.isolated)
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _make_folder(setup: Setup, job: dict[str, Any], blobs: list[bytes]) -> str:
    if setup.isolated:
        size = max(job["limits"]["file_bytes"], resource.getpagesize())  # 0 would be without limit
        options = f"mode=1777,size={size},nr_inodes={1024 + size // 4096}"
        seen = {path: os.open(path, os.O_PATH) for path in setup.below_tmp}
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        for path, covered in seen.items():
            kernel.bind_descriptor(covered, path)
            os.close(covered)
        folder = FOLDER
        os.mkdir(folder)
    else:
        folder = tempfile.mkdtemp(prefix="sao-code-")
    made = [folder]
    for name, data in zip(job["files"], blobs, strict=False):
        path = os.path.join(folder, name)
        parent = os.path.dirname(path)
        while parent not in made and not os.path.isdir(parent):
            made.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, _OF_FILES)
        made.append(path)
    if setup.separate_user:
        for path in made:
            os.chown(path, job["uid"], job["uid"])
    return folder


def _be_the_program(
    setup: Setup, job: dict[str, Any], stdin: bytes, folder: str, filter_steps: list[seccomp.Instruction]
) -> NoReturn:
    work: Callable[[], None]
    os.setsid()
    given = os.memfd_create("stdin")
    with open(given, "wb", closefd=False) as file:
        file.write(stdin)
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.dup2(setup.stdout, 1)
    os.dup2(setup.stderr, 2)
    session = job["argv"] is None
    if session:
        os.dup2(setup.cells, 3, inheritable=False)
    os.closerange(4 if session else 3, 1 << 16)
    os.chdir(folder)
    _limit(job["limits"], setup.isolated and job["limit_processes"], session)
    if setup.isolated:
        kernel.keep_capabilities(("SETUID", "SETGID") if setup.separate_user else ())
        if setup.separate_user:
            os.setgroups([])
            os.setresgid(job["uid"], job["uid"], job["uid"])
            os.setresuid(job["uid"], job["uid"], job["uid"])
            kernel.limit_capabilities(())
        kernel.forbid_new_privileges()
        seccomp.install(filter_steps)
    else:
        kernel.die_with_parent()
        os.environ.update(HOME=folder, TMPDIR=folder)
    kernel.set_dumpable(True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.disable()
    work = (lambda: cells.serve(3)) if session else program.of(job["argv"])
    leave = program.leave
    for name in [name for name in sys.modules if name.partition(".")[0] == "infra"]:
        del sys.modules[name]
    leave(work)


def _limit(limits: dict[str, Any], processes: bool, session: bool) -> None:
    """Per process; what they use together is watched. RLIMIT_DATA counts what is written, RLIMIT_AS all addresses."""
    memory = limits["memory_bytes"]
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_AS: 4 * memory + 2**30,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if processes:
        wanted[resource.RLIMIT_NPROC] = limits["processes"]
    if not session:  # its limit is for each piece of code, and is watched
        wanted[resource.RLIMIT_CPU] = int(limits["cpu_s"]) + 1
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (most, most))


def _serve(setup: Setup, job: dict[str, Any], control: socket.socket, child: int, folder: int) -> None:
    began = time.monotonic()
    for descriptor in (setup.stdout, setup.stderr, setup.cells):
        os.close(descriptor)
    watched = _Watched(child, os.pidfd_open(child), job["limits"], setup.isolated)
    control.sendall(wire.encode({"event": "started"}))
    if setup.isolated:
        kernel.limit_capabilities(("DAC_READ_SEARCH", "KILL", "SYS_PTRACE") if setup.separate_user else ())
    status, stopped = _watch(watched, control)
    wall_s = time.monotonic() - began
    _kill_all(setup.isolated)
    if stopped is None and status == -signal.SIGXCPU:
        stopped = "cpu"
    found = {} if stopped else collect.regular_files(folder, job["collect"], job["limits"]["file_bytes"])
    done = {"event": "done", "status": status, "stopped": stopped, "wall_s": wall_s, "files": list(found)}
    control.sendall(wire.encode(done, list(found.values())))
    control.recv(1)  # the worker has read what the program wrote and lets go


def _watch(watched: _Watched, control: socket.socket) -> tuple[int | None, str | None]:
    """Until the program ends or goes over a limit: (how it ended as `Popen.returncode` says it, the limit)."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(watched.descriptor, select.POLLIN)
    free_cpu_s = 0.0
    while True:
        ready = [descriptor for descriptor, _ in poller.poll(TICK_S * 1000)]
        if control.fileno() in ready:
            if wire.receive(control) is None:
                return None, "gone"
            free_cpu_s = watch.usage(not watched.isolated).cpu_s  # a mark: the next piece of code starts at zero
        status = _reap(watched.main)
        if status is not None:
            return status, None
        used = watch.usage(not watched.isolated)
        if used.cpu_s - free_cpu_s > watched.limits["cpu_s"]:
            return None, "cpu"
        if used.threads > watched.limits["processes"]:
            return None, "memory"
        most = watched.limits["memory_bytes"]
        if sum(used.resident.values()) > most and watch.proportional_bytes(used.resident) > most:
            return None, "memory"


def _reap(main: int) -> int | None:
    """Bury the dead, whose parent this is in the end; the main process's end if it is among them."""
    ended = None
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == main:
                ended = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill_all(isolated: bool) -> None:
    if isolated and os.getpid() != 1:
        raise RuntimeError("not process 1 of a box: would kill everything on the machine")
    while True:
        if isolated:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            for pid in watch.usage(only_descendants=True).resident:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
