"""Makes the namespaces of a box and its file system by itself, where bubblewrap does not.

    first process: leaves for new namespaces, forks, waits         second process: process 1 of the box, mounts, pivots

Returns in the second process only. The worker's plan says what is seen inside, as lists of an action and its paths.
"""

from __future__ import annotations

import os
import socket

from infra.sandbox.inside import kernel

KEPT = ("CHOWN", "DAC_READ_SEARCH", "KILL", "SETGID", "SETUID", "SETPCAP", "SYS_PTRACE", "SYS_ADMIN")
"""What process 1 may do until the program starts; some of it only where the program has a user of its own."""
USER = 1000
"""The user inside, where there is a user namespace."""

_OLD, _NEW = "/old", "/new"


def enter(plan: list[list[str]], separate_user: bool, keep: tuple[int, ...]) -> None:
    """Be process 1 of a new box whose first process keeps only the descriptors ``keep`` and standard error."""
    uid, gid = os.getuid(), os.getgid()
    inner = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    outer = kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP
    kernel.unshare(inner | outer | (0 if separate_user else kernel.CLONE_NEWUSER))
    if not separate_user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{USER} {uid} 1")
        _write("/proc/self/gid_map", f"{USER} {gid} 1")
    child = os.fork()
    if child:
        for descriptor in keep:
            os.close(descriptor)
        os.waitpid(child, 0)
        os._exit(0)
    kernel.die_with_parent()
    socket.sethostname("sandbox")
    kernel.bring_up_loopback()
    _make_root(plan)
    kernel.keep_capabilities(KEPT)


def _make_root(plan: list[list[str]]) -> None:
    # A scratch root first: what is to be seen may lie anywhere in the old one, also where the new one is mounted.
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp" + _OLD)
    os.mkdir("/tmp" + _NEW)
    kernel.pivot_root_keeping("/tmp", "/tmp" + _OLD)
    kernel.mount("tmpfs", _NEW, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for action, source, target in plan:
        _see(action, source, _NEW + target)
    kernel.mount("none", _NEW, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    kernel.pivot_root(_NEW)


def _see(action: str, source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if action == "folder":
        os.makedirs(target, exist_ok=True)
    elif action == "link":
        os.symlink(source, target)
    elif action == "proc":
        os.mkdir(target)
        kernel.mount("proc", target, "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        kernel.make_read_only(target)
    else:
        if os.path.isdir(_OLD + source):
            os.makedirs(target, exist_ok=True)
        else:
            with open(target, "x"):
                pass
        kernel.mount(_OLD + source, target, flags=kernel.MS_BIND | kernel.MS_REC)
        if action == "read":
            kernel.make_read_only(target)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
