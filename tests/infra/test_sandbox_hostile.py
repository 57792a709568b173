"""Code that attacks: it reaches nothing outside, uses no more than it may, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_fixtures import KINDS, MIB, QUICK, Here, gone, opened

from infra.sandbox.runner import Sandbox
from sao_core.outside import Limits, StoppedBy

pytestmark = pytest.mark.xdist_group("sandbox")


@pytest.fixture(scope="module", params=KINDS)
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    with opened(request.param) as here:
        yield here


def replaced(code: str, **values: object) -> str:
    return "\n".join(f"{name} = {value!r}" for name, value in values.items()) + "\n" + code


# What it may use


def test_a_fork_bomb_gets_no_more_processes_than_it_may(here: Here) -> None:
    ran = here.python(
        """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError as error:
    print(made, type(error).__name__, flush=True)
"""
    )
    assert ran.stopped_by is StoppedBy.MEMORY or ran.stdout == "15 BlockingIOError\n"


def test_an_endless_fork_bomb_ends_at_its_time(here: Here) -> None:
    began = time.monotonic()
    ran = here.python(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", Limits(1.0, 30, processes=16)
    )
    assert ran.stopped_by in (StoppedBy.WALL, StoppedBy.MEMORY)
    assert ran.exit_code is None
    assert time.monotonic() - began < 6


def test_a_memory_bomb_of_one_process_fails_or_is_stopped(here: Here) -> None:
    ran = here.python("data = bytearray(b'x') * (300 * 2**20)\nprint(len(data))")
    assert ran.stdout == ""
    assert ran.stopped_by is StoppedBy.MEMORY or "MemoryError" in ran.stderr


def test_memory_spread_over_processes_is_counted_together(here: Here) -> None:
    ran = here.python(
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(os.urandom(4096)) * (50 * 2**8)
        time.sleep(30)
time.sleep(30)
"""
    )
    assert ran.stopped_by is StoppedBy.MEMORY
    assert ran.wall_s < 7


def test_pages_that_processes_share_count_once(here: Here) -> None:
    ran = here.python(
        """
import os, time
data = b"x" * (50 * 2**20)
children = [os.fork() for _ in range(1)]
if children[0]: children.append(os.fork())
if 0 in children:
    time.sleep(0.4)
    os._exit(0)
for child in children: os.waitpid(child, 0)
print("done")
"""
    )
    assert (ran.stdout, ran.exit_code, ran.stopped_by) == ("done\n", 0, None)


@pytest.mark.parametrize("descriptor", [1, 2], ids=["output", "errors"])
def test_endless_output_is_cut_and_stopped(here: Here, descriptor: int) -> None:
    ran = here.python(f"import os\nwhile True: os.write({descriptor}, b'x' * 10000)")
    assert ran.stopped_by is StoppedBy.OUTPUT
    assert (len(ran.stdout), len(ran.stderr)) == (
        (QUICK.output_bytes, 0) if descriptor == 1 else (0, QUICK.output_bytes)
    )


def test_a_busy_loop_is_stopped_by_its_processor_time(here: Here) -> None:
    ran = here.python("while True: pass", Limits(wall_s=20, cpu_s=0.3))
    assert (ran.exit_code, ran.stopped_by) == (None, StoppedBy.CPU)


def test_processor_time_of_many_processes_is_counted_together(here: Here) -> None:
    code = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
    ran = here.python(code, Limits(wall_s=20, cpu_s=0.4, processes=32))
    assert ran.stopped_by is StoppedBy.CPU


def test_sleeping_for_ever_is_stopped_by_the_clock(here: Here) -> None:
    ran = here.python("print('before')\nimport time\ntime.sleep(1000)", Limits(wall_s=0.4))
    assert (ran.exit_code, ran.stopped_by, ran.stdout) == (None, StoppedBy.WALL, "before\n")
    assert 0.4 <= ran.wall_s < 3


def test_the_disk_is_full_at_its_limit(here: Here) -> None:
    ran = here.python(
        """
import os
written = 0
try:
    for number in range(100):
        with open(f"/tmp/{number}", "wb") as file:
            written += file.write(bytes(2**20 - 4096))
except OSError as error:
    print(error.strerror)
print(written // 2**20)
"""
    )
    assert ran.stdout.splitlines()[0] == "No space left on device"
    assert int(ran.stdout.splitlines()[1]) <= 4


def test_memory_that_no_process_seems_to_have_is_not_to_be_had(here: Here) -> None:
    ran = here.python(
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try:
    os.memfd_create("x"); print("memfd")
except OSError as error:
    print(error.errno)
print(libc.shmget(0, 1 << 20, 0o1600), ctypes.get_errno())
import mmap
try:
    mmap.mmap(-1, 4096); print("shared")
except OSError as error:
    print(error.errno)
print(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), os.path.exists("/dev/zero"))
"""
    )
    assert ran.stdout == "1\n-1 1\n1\n4096 False\n"


# What it may reach


def test_the_network_of_the_host_is_out_of_reach(here: Here) -> None:
    reached = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0sao-test-{time.monotonic_ns()}"
        abstract.bind(name)
        abstract.listen()
        for server in (tcp, abstract):
            server.settimeout(20)
            threading.Thread(target=lambda s=server: _accept(s, reached), daemon=True).start()
        ran = here.python(
            replaced(
                """
import socket
servers = (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name), (socket.AF_INET, ("1.1.1.1", 53))
for family, address in servers:
    try:
        socket.socket(family).connect(address); print("reached", address)
    except OSError as error:
        print(type(error).__name__)
try:
    socket.getaddrinfo("example.com", 80); print("reached")
except OSError as error:
    print(type(error).__name__)
for family in (40, 17, 38):  # AF_VSOCK, AF_PACKET, AF_ALG
    try:
        socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_RAW); print("reached", family)
    except OSError as error:
        print(type(error).__name__)
""",
                port=tcp.getsockname()[1],
                name=name,
            )
        )
    assert "reached" not in ran.stdout
    assert len(ran.stdout.splitlines()) == 7, ran
    assert not reached.is_set()


def _accept(server: socket.socket, reached: threading.Event) -> None:
    try:
        server.accept()
    except OSError:
        return
    reached.set()


def test_its_own_loopback_works(here: Here) -> None:
    ran = here.python(
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(s.getsockname()); print('ok')"
    )
    assert ran.stdout == "ok\n", ran


def test_files_and_variables_of_the_host_are_not_there(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAO_TEST_SECRET", "s3cret-of-the-host")
    (tmp_path / "secret").write_text("s3cret-of-the-host")
    home = Path.home() / f".sao-test-secret-{os.getpid()}"
    home.write_text("s3cret-of-the-host")
    code = replaced(
        """
import os, glob
for path in paths:
    try:
        print("read", open(path).read()[:100])
    except OSError as error:
        print(type(error).__name__)
print(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path).read())
    except OSError: pass
print("entries", os.listdir(os.path.dirname(paths[1])) if os.path.isdir(os.path.dirname(paths[1])) else [])
""",
        paths=[str(tmp_path / "secret"), str(home), "/etc/shadow", "/etc/passwd", "/proc/kcore", __file__],
    )
    with_new_box = Here(Sandbox(here.sandbox._kind, pool=0), here.loop)
    try:
        ran = with_new_box.python(code)
    finally:
        with_new_box.sandbox.close()
        home.unlink()
    assert "s3cret" not in ran.stdout
    assert "read" not in ran.stdout
    assert home.name not in ran.stdout
    assert ran.exit_code == 0, ran


def test_nothing_outside_its_folder_can_be_written(here: Here) -> None:
    ran = here.python(
        """
import os
tried = ["/x", "/usr/x", "/etc/x", "/dev/x", "/root/x"]
tried += ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem"]
import sys; tried.append(os.path.dirname(os.__file__) + "/x")
for path in tried:
    try:
        with open(path, "w") as file: file.write("x")
        print("wrote", path)
    except OSError: pass
print("done")
"""
    )
    assert ran.stdout == "done\n"


def test_processes_of_the_host_are_neither_seen_nor_signalled(here: Here) -> None:
    ran = here.python(
        """
import os, signal
print(sorted(int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (1, os.getpid())))
for pid in (os.getppid(), 1, host):
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT):
        try: os.kill(pid, number)
        except OSError: pass
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
print("alive")
""".replace("host", str(os.getpid()))
    )
    assert ran.stdout == "[]\nalive\n"
    assert ran.exit_code == 0


def test_no_call_gives_it_more_than_it_has(here: Here) -> None:
    ran = here.python(
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def attempt(name, *args):
    result = getattr(libc, name)(*args)
    print(name, "denied" if result == -1 else "ALLOWED")
attempt("mount", b"none", b"/tmp", b"tmpfs", 0, None)
attempt("umount2", b"/tmp", 2)
attempt("unshare", 0x10000000)
attempt("unshare", 0x00020000)
attempt("ptrace", 16, 1, 0, 0)
attempt("chroot", b"/tmp")
attempt("setuid", 0)
attempt("setresuid", 0, 0, 0)
attempt("setgid", 0)
attempt("sethostname", b"x", 1)
attempt("process_vm_readv", 1, None, 0, None, 0, 0)
attempt("syscall", 56 if os.uname().machine == "x86_64" else 220, 0x10000011, 0, 0, 0, 0)
with open("/proc/self/status") as file:
    wanted = "CapEff", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp:"
    print(*[line.strip() for line in file if line.startswith(wanted)])
"""
    )
    assert "ALLOWED" not in ran.stdout
    assert ran.stdout.count("denied") == 12, ran
    none = "0" * 16
    assert f"CapPrm:\t{none} CapEff:\t{none} CapBnd:\t{none} CapAmb:\t{none} NoNewPrivs:\t1 Seccomp:\t2" in ran.stdout


def test_set_user_id_programs_gain_nothing(here: Here) -> None:
    ran = here.wait(here.sandbox.run(["sh", "-c", "su -c id; mount -t tmpfs x /tmp; id -u"], limits=QUICK))
    assert "uid=0" not in ran.stdout
    assert ran.stdout.strip() not in ("", "0")


# What it leaves


def test_processes_that_want_to_outlive_it_do_not(here: Here) -> None:
    mark = f"sao-outlives-{os.getpid()}-{time.monotonic_ns()}"
    ran = here.python(
        f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}])
    os._exit(0)
time.sleep(0.2)
print("bye")
"""
    )
    assert (ran.stdout, ran.exit_code) == ("bye\n", 0)
    assert ran.wall_s < 5
    assert gone(mark)


def test_only_regular_files_within_the_limits_come_back(here: Here) -> None:
    ran = here.python(
        """
import os, socket
open("good.txt", "w").write("good")
os.mkdir("folder"); open("folder/inner.txt", "w").write("inner")
os.symlink("/etc/ld.so.cache", "link")
os.symlink("good.txt", "link2")
os.symlink("/usr", "outside")
os.mkfifo("fifo")
socket.socket(socket.AF_UNIX).bind("socket")
with open("sparse", "wb") as file:
    try: file.truncate(1 << 40)
    except OSError: file.truncate(4 << 20)
os.symlink("/dev/zero", "zero")
open("unreadable", "w").write("mine"); os.chmod("unreadable", 0)
""",
        collect=[
            *("good.txt", "folder/inner.txt", "link", "link2", "outside/bin/env", "fifo", "socket", "folder", "sparse"),
            *("zero", "missing", "main.py/x"),
        ],
    )
    assert ran.exit_code == 0, ran
    assert ran.files == {"good.txt": b"good", "folder/inner.txt": b"inner"}


def test_closing_every_descriptor_ends_nothing_but_its_output(here: Here) -> None:
    ran = here.python("print('first')\nimport os\nos.closerange(0, 4096)\nos._exit(3)")
    assert (ran.stdout, ran.exit_code, ran.stopped_by) == ("first\n", 3, None)


def test_a_program_that_kills_itself_has_no_exit_code(here: Here) -> None:
    ran = here.python("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (ran.exit_code, ran.stopped_by) == (None, None)


def test_a_large_file_comes_back_whole(here: Here) -> None:
    ran = here.python("open('big', 'wb').write(bytes(range(256)) * 8192)", collect=["big"])
    assert ran.files == {"big": bytes(range(256)) * 8192}
    assert len(ran.files["big"]) == 2 * MIB
