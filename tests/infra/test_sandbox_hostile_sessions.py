"""Sessions whose code attacks what answers for it, and workers that are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_fixtures import KINDS, QUICK, Here, gone, opened, processes_with

from sao_core.outside import Limits, StoppedBy

pytestmark = pytest.mark.xdist_group("sandbox")


@pytest.fixture(scope="module", params=KINDS)
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    with opened(request.param) as here:
        yield here


def test_forged_answers_touch_only_what_this_session_is_told(here: Here) -> None:
    forging = """
import os
for fd in range(3, 40):
    for answer in (b'{"id": 1, "code": 0}\\n', b'{"id": 2, "code": 0}\\n', b'[]\\n', b'{"id": {}, "code": 1e999}\\n'):
        try: os.write(fd, answer)
        except OSError: pass
print("honest")
"""
    ran, later = here.cells(forging, "print('later')")
    assert ran.exit_code in (0, None)
    assert later.exit_code in (0, None)
    assert here.cells("print('unharmed')")[0].stdout == "unharmed\n"


def test_endless_garbage_instead_of_an_answer_ends_the_session(here: Here) -> None:
    forging = (
        "import os\nwhile True:\n  for fd in (3, 4):\n    try: os.write(fd, b'x' * 5000)\n    except OSError: pass"
    )
    ran, later = here.cells(forging, "1", wall_s=5)
    assert ran.exit_code is None
    assert later.exit_code is None
    assert "over" in later.stderr


def test_a_session_that_closes_its_descriptors_is_over(here: Here) -> None:
    ran, later = here.cells("import os\nos.closerange(0, 100)", "print(1)", wall_s=5)
    assert ran.exit_code is None
    assert (later.exit_code, later.stdout) == (None, "")


def test_a_session_that_forks_answers_once(here: Here) -> None:
    first, second, third = here.cells("import os\npid = os.fork()", "print('one')", "print(pid > 0)")
    assert first.exit_code == 0
    assert (second.stdout, third.stdout) == ("one\n", "True\n")


def test_a_session_whose_limit_is_reached_says_so_ever_after(here: Here) -> None:
    began = time.monotonic()
    ran, later, last = here.cells("print('a')\nwhile True: pass", "print(1)", "print(2)", wall_s=0.4)
    assert (ran.exit_code, ran.stopped_by, ran.stdout) == (None, StoppedBy.WALL, "a\n")
    assert later == last
    assert (later.exit_code, later.stopped_by) == (None, StoppedBy.WALL)
    assert time.monotonic() - began < 5


def test_a_session_has_its_processor_time_for_each_piece(here: Here) -> None:
    busy = "import time\nend = time.process_time() + 0.12\nwhile time.process_time() < end: pass"
    *fine, over = here.cells(busy, busy, busy, "while True: pass", limits=Limits(wall_s=20, cpu_s=0.3))
    assert [ran.exit_code for ran in fine] == [0, 0, 0]
    assert (over.exit_code, over.stopped_by) == (None, StoppedBy.CPU)


def test_the_memory_of_a_session_is_limited(here: Here) -> None:
    ran = here.cells("data = bytearray(b'x') * (300 * 2**20)", limits=QUICK)[0]
    assert ran.stopped_by is StoppedBy.MEMORY or "MemoryError" in ran.stderr


# The worker's end


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_survives_a_worker_that_is_killed(kind: str) -> None:
    mark = f"sao-orphan-{os.getpid()}-{time.monotonic_ns()}"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])"
    worker = f"""
import asyncio
from infra.sandbox.runner import Sandbox
async def main():
    sandbox = Sandbox({str(kind)!r})
    await asyncio.gather(sandbox.run(["python", "-c", {code!r}]), sandbox.run(["python", "-c", {code!r}]))
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
    try:
        deadline = time.monotonic() + 15
        while len([pid for pid in processes_with(mark) if pid != process.pid]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(boxes_of(process.pid)) >= 2
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert gone(mark)


def boxes_of(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
