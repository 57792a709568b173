"""System calls that Python has no function for, by name; each raises OSError like `os` does.

Nothing here decides anything.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

CAPABILITIES = {"CHOWN": 0, "DAC_READ_SEARCH": 2, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}
CAPABILITIES |= {"SYS_PTRACE": 19, "SYS_ADMIN": 21}

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} ({what})")
    return result


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    """prctl(2) with up to two arguments."""
    return _checked(_libc.prctl(option, first, second, 0, 0), f"prctl {option}")


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_dumpable(on: bool) -> None:
    """Whether others of this user may trace this process and read its memory and descriptors."""
    prctl(_PR_SET_DUMPABLE, int(on))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has died."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """No program started from here on gains anything by set-user-id bits or file capabilities."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def keep_capabilities(names: tuple[str, ...]) -> None:
    """Give up all others, and let no program that is started from here on gain any."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    with open("/proc/sys/kernel/cap_last_cap") as last:
        highest = int(last.read())
    for number in range(highest + 1):
        prctl(_PR_CAPBSET_DROP, number)
    limit_capabilities(names)


def limit_capabilities(names: tuple[str, ...]) -> None:
    """Have at most these from now on."""
    kept = sum(1 << CAPABILITIES[name] for name in names)
    sets = struct.pack("=6I", kept, kept, 0, kept >> 32, kept >> 32, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, sets), "capset")


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()),
        f"mount {source} at {target}",
    )


def bind_descriptor(descriptor: int, target: str) -> None:
    """See what ``descriptor`` names, as it is mounted, at ``target``, which is made."""
    source = f"/proc/self/fd/{descriptor}"
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, flags=MS_BIND | MS_REC)


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without set-user-id bits and devices."""
    attributes = struct.pack("=4Q", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    _checked(
        _libc.syscall(_MOUNT_SETATTR, -1, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))),
        f"read-only {target}",
    )


def pivot_root_keeping(root: str, old: str) -> None:
    """Make ``root`` the root, the old one stays at ``old`` below it."""
    _checked(_libc.pivot_root(root.encode(), old.encode()), f"pivot_root {root}")
    os.chdir("/")


def pivot_root(root: str) -> None:
    """Make ``root`` the root and let go of the old one."""
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), f"pivot_root {root}")
    _checked(_libc.umount2(b".", MNT_DETACH), "unmount of the old root")
    os.chdir("/")


def bring_up_loopback() -> None:
    """Make 127.0.0.1 work in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        flags: int = struct.unpack_from("16xH", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
