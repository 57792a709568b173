"""The way of those who are not root, a user namespace with a single user: here the kernel's limits are others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sandbox_fixtures import KINDS, Here, opened

from infra.sandbox import runner
from infra.sandbox.isolation import Isolation, Kind, NoIsolation
from sao_core.outside import Limits, StoppedBy

pytestmark = pytest.mark.xdist_group("sandbox")


@pytest.fixture(params=KINDS)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr(runner, "_found", {})
    monkeypatch.setattr(runner, "ways", lambda kind: [Isolation(kind, separate_user=False)])
    with opened(Kind(request.param)) as here:
        try:
            here.wait(here.sandbox.isolation())
        except NoIsolation as none:
            if os.geteuid() != 0:
                raise
            pytest.skip(f"root needs no user namespace, and there are none here: {none}")
        yield here


def test_neither_a_fork_bomb_nor_an_attack_on_process_1_gets_anywhere(here: Here) -> None:
    bomb = here.python(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", Limits(1.0, processes=16)
    )
    assert bomb.stopped_by in (StoppedBy.WALL, StoppedBy.MEMORY)
    ran = here.python(
        """
import ctypes, os, signal
libc = ctypes.CDLL(None)
print(libc.ptrace(16, 1, 0, 0), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.unshare(0x10000000))
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/4", "/proc/sys/kernel/core_pattern", "/etc/shadow"):
    try: open(path, "r+b"); print("opened", path)
    except OSError: pass
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
    os.kill(1, number)
print(*[line for line in open("/proc/self/status") if line.startswith("CapPrm")])
open("x", "w").write("kept")
""",
        collect=["x"],
    )
    assert ran.stdout.split() == ["-1", "-1", "-1", "CapPrm:", "0" * 16]
    assert (ran.exit_code, ran.stderr, ran.files) == (0, "", {"x": b"kept"})
