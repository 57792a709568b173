"""How boxes are kept apart from this machine: the ways there are, which one works here, how a box is started with it.

A way counts as working only after a box was really made with it. Without a working one nothing is started; that code
runs unisolated is said by `SAO_SANDBOX=none` alone, and logged on every start.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePosixPath

from infra.sandbox.inside.enter import KEPT, USER
from infra.sandbox.inside.guest import Setup

logger = logging.getLogger(__name__)

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "full", "random", "urandom")
"""Not `zero`: mapped, it is memory that counts for no process."""
CODE = "/sao"
"""Where the inside's own modules are seen in a box that bubblewrap makes."""
WAY_OUT = (
    "install bubblewrap (apt-get install bubblewrap), or allow user namespaces (sysctl user.max_user_namespaces; in a "
    "container its seccomp and AppArmor profiles), or set SAO_SANDBOX=none at your own risk: code then runs as you"
)
_BOOT = (
    "import sys; root = sys.argv.pop(1); sys.path.insert(0, root); "
    "from infra.sandbox.inside.guest import main; sys.path.remove(root); main()"
)
_PER_NAMESPACE_COUNTS = (5, 14)
"""Since this Linux RLIMIT_NPROC counts a user's processes in each user namespace apart."""


class Kind(StrEnum):
    """What `SAO_SANDBOX` may say; AUTO is the best of the next two that works."""

    AUTO = "auto"
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    NONE = "none"


class NoIsolation(RuntimeError):
    """No way to keep code apart works here; the message says why and what to do."""


@dataclass(frozen=True)
class Isolation:
    """One way to make a box."""

    kind: Kind
    separate_user: bool
    """The program gets a user number of its own, which takes real root; else a user namespace with a single user."""

    @property
    def isolated(self) -> bool:
        """False for :attr:`Kind.NONE` alone."""
        return self.kind is not Kind.NONE

    @property
    def title(self) -> str:
        """For people."""
        if not self.isolated:
            return "none: code that a model wrote runs as this user, with network and files"
        return f"{self.kind} ({'a user of its own' if self.separate_user else 'a user namespace'})"

    @property
    def limits_processes(self) -> bool:
        """Whether the kernel's own limit counts a box's processes alone and applies to them."""
        if self.separate_user:
            return True
        release = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdecimal())
        return self.isolated and os.getuid() != 0 and release >= _PER_NAMESPACE_COUNTS

    def start(self, control: int, cells: int, stdout: int, stderr: int, trouble: int) -> subprocess.Popen[bytes]:
        """Start a box over these descriptors; what goes wrong on its start is written to ``trouble``."""
        plan = [list(step) for step in self._plan] if self.kind is Kind.NAMESPACES else None
        below_tmp = [t for action, _, t in self._plan if action == "read" and t.startswith("/tmp/") and self.isolated]
        setup = Setup(control, cells, stdout, stderr, self.isolated, self.separate_user, plan, below_tmp)
        bubblewrap = self.kind is Kind.BUBBLEWRAP
        root = CODE if bubblewrap else str(Path(__file__).parents[2])
        python = [sys.executable, "-c", _BOOT, root, json.dumps(asdict(setup))]
        return subprocess.Popen(
            [*self._bubblewrap, *python] if bubblewrap else python,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=trouble,
            env=_environment(),
            cwd="/",
            pass_fds=(control, cells, stdout, stderr),
            start_new_session=True,
        )

    @cached_property
    def _plan(self) -> list[tuple[str, str, str]]:
        """What is seen inside: (action, source, target)."""
        steps: list[tuple[str, str, str]] = []
        seen: list[str] = []
        for path in (*SYSTEM, *ETC):
            if os.path.islink(path) and path in SYSTEM:
                steps.append(("link", os.readlink(path), path))
            elif os.path.exists(path):
                steps.append(("read", os.path.realpath(path), path))
                seen.append(path)
        for source, target in _python_places():
            if not _lies_in(target, seen):
                steps.append(("read", source, target))
                seen.append(target)
        steps += [("device", f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
        steps += [("link", "/tmp", "/dev/shm"), ("link", "/proc/self/fd", "/dev/fd")]
        steps += [
            ("link", f"/proc/self/fd/{n}", f"/dev/{name}") for n, name in enumerate(("stdin", "stdout", "stderr"))
        ]
        if self.kind is Kind.BUBBLEWRAP:
            inside = Path(__file__).parent / "inside"
            steps.append(("read", str(inside), f"{CODE}/infra/sandbox/inside"))
        # By name, because bubblewrap shuts folders that it makes on the way to everybody but its own user.
        ways = dict.fromkeys(str(way) for _, _, target in steps for way in reversed(PurePosixPath(target).parents))
        folders = [("folder", "", way) for way in ways if way != "/" and not _lies_in(way, seen)]
        return [*folders, *steps, ("folder", "", "/tmp"), ("proc", "", "/proc")]

    @cached_property
    def _bubblewrap(self) -> Sequence[str]:
        kept = KEPT if self.separate_user else ("SYS_ADMIN", "SETPCAP")
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--hostname", "sandbox", "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL"]
        if not self.separate_user:
            options += ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
        for name in kept:
            options += ["--cap-add", f"CAP_{name}"]
        for action, source, target in self._plan:
            match action:
                case "read":
                    options += ["--ro-bind", source, target]
                case "device":
                    options += ["--dev-bind", source, target]
                case "link":
                    options += ["--symlink", source, target]
                case "folder":
                    options += ["--dir", target]
                case "proc":
                    options += ["--proc", target, "--remount-ro", target]
        return [shutil.which("bwrap") or "bwrap", *options, "--remount-ro", "/", "--chdir", "/", "--"]


def ways(kind: Kind) -> list[Isolation]:
    """What to try for ``kind``, best first; the processes of root get a user of their own where that is possible."""
    if kind is Kind.NONE:
        return [Isolation(Kind.NONE, separate_user=False)]
    kinds = [Kind.BUBBLEWRAP, Kind.NAMESPACES] if kind is Kind.AUTO else [kind]
    if kind is Kind.AUTO and shutil.which("bwrap") is None:
        kinds.remove(Kind.BUBBLEWRAP)
    users = (True, False) if os.geteuid() == 0 else (False,)
    return [Isolation(one, separate_user) for one in kinds for separate_user in users]


def no_isolation(kind: Kind, troubles: Sequence[tuple[Isolation, str]]) -> NoIsolation:
    """The refusal, with what each way that was tried said."""
    said = "; ".join(f"{way.title}: {' '.join(trouble.split())[-200:]}" for way, trouble in troubles)
    return NoIsolation(f"there is no sandbox for code that a model wrote (SAO_SANDBOX={kind}): {WAY_OUT} [{said}]")


def _lies_in(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _environment() -> dict[str, str]:
    """All that a program sees: nothing of this process's own variables."""
    folders = dict.fromkeys((os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"))
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **one_thread,
        "PATH": ":".join(folders),
        "HOME": "/tmp/work",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the same program gives the same answer
        "PYTHONUNBUFFERED": "1",  # what a program that is stopped had printed is not lost
    }


def _python_places() -> list[tuple[str, str]]:
    """What this interpreter needs to start, and its installed packages: (where it lies, where it is looked for)."""
    interpreter = os.path.realpath(sys.executable)
    home = os.path.realpath(sys.base_prefix)
    places = [(f"{home}/{name}", f"{prefix}/{name}") for prefix in (home, sys.base_prefix) for name in ("lib", "lib64")]
    places += [(f"{sys.prefix}/{name}", f"{sys.prefix}/{name}") for name in ("lib", "pyvenv.cfg")]
    places.append((interpreter, interpreter))
    places += [(interpreter, f"{os.path.dirname(sys.executable)}/{name}") for name in ("python", "python3")]
    places.append((interpreter, sys.executable))
    found = [(source, target) for source, target in places if os.path.exists(source)]
    return [(os.path.realpath(source), target) for source, target in dict.fromkeys(found)]
