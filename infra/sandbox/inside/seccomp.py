"""The system call filter of a program in a box: what ordinary programs never need and attacks on kernels do.

Denied calls fail with EPERM (clone3 with ENOSYS, so that C libraries use clone, whose flags a filter can read). A list
of what is denied, not of what is allowed: namespaces and missing capabilities carry the isolation, this narrows it.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from infra.sandbox.inside import kernel

_NUMBERS = {
    # name: (x86_64, aarch64)
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "acct": (163, 89),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "memfd_secret": (447, 447),
}
_CLONE, _CLONE3, _SOCKET, _MMAP = (56, 220), (435, 435), (41, 198), (9, 222)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column above, and what the kernel calls it."""
_X32 = 0x40000000
"""Numbers from here on are x86_64's second, little used set of the same calls."""

_NAMESPACES = 0x7E020080
"""Every CLONE_NEW* flag: user, process, mount, network, ipc, host name, cgroup, and time."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: these end at the network namespace, others (AF_VSOCK) reach the host."""

_SHARED_ANONYMOUS = 0x21
"""MAP_SHARED | MAP_ANONYMOUS: memory that can be unmapped and kept, so that it counts for no process. What processes
want to share fits into files in /dev/shm, whose size is limited."""

_LOAD, _AND, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT, _FOURTH_ARGUMENT_AT = 0, 4, 16, 40
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]
"""code, jump if true, jump if false, constant: struct sock_filter."""


def program(machine: str) -> list[Instruction]:
    """The filter for ``machine`` as classic BPF; empty where its numbers are not known here."""
    if machine not in _ARCHITECTURES:
        return []
    column, architecture = _ARCHITECTURES[machine]
    steps: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        steps += [(_JUMP_ABOVE, 0, 1, _X32), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    for numbers in _NUMBERS.values():
        steps += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    steps += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    steps += [
        (_JUMP_EQUAL, 0, 5, _MMAP[column]),
        (_LOAD, 0, 0, _FOURTH_ARGUMENT_AT),
        (_AND, 0, 0, _SHARED_ANONYMOUS),
        (_JUMP_EQUAL, 0, 1, _SHARED_ANONYMOUS),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    steps += [
        (_JUMP_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_ANY_BIT, 0, 4 + len(_FAMILIES), _NAMESPACES),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_JUMP_EQUAL, 0, 2 + len(_FAMILIES), _SOCKET[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        *((_JUMP_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return steps


def install(steps: list[Instruction]) -> None:
    """Put this process and all that it starts under the filter, for good; needs no_new_privs."""
    if not steps:
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(head))


def machine() -> str:
    """This machine's name as :func:`program` takes it."""
    return platform.machine()
