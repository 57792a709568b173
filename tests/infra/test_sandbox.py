"""The sandbox for honest code: what programs and sessions get and give, the pool, refusals, what closing leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_fixtures import KINDS, QUICK, Here, gone, opened, processes_with

from infra.sandbox import isolation, runner
from infra.sandbox.doctor import examine
from infra.sandbox.inside import seccomp, wire
from infra.sandbox.isolation import Kind, NoIsolation
from infra.sandbox.runner import Sandbox
from infra.settings import Settings, SettingsError
from sao_core.outside import Limits, Ran, StoppedBy

pytestmark = pytest.mark.xdist_group("sandbox")


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    """The best kind that is installed; the kinds differ in how a box is made, not in what happens in it."""
    with opened(KINDS[0]) as here:
        yield here


@pytest.fixture(scope="module", params=[*KINDS, Kind.NONE])
def everywhere(request: pytest.FixtureRequest) -> Iterator[Here]:
    with opened(request.param) as here:
        yield here


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


# Programs


def test_a_program_gets_its_files_arguments_and_input(everywhere: Here) -> None:
    ran = everywhere.wait(
        everywhere.sandbox.run(
            ["python", "src/main.py", "a", "b"],
            files={
                "src/main.py": "import sys, helper\nprint(sys.argv, input(), helper.x, open('data.bin', 'rb').read())",
                "src/helper.py": "x = 'größe'",
                "data.bin": b"\xff\x00",
            },
            stdin="line one\nline two\n",
        )
    )
    assert ran.stdout == "['src/main.py', 'a', 'b'] line one größe b'\\xff\\x00'\n"
    assert (ran.exit_code, ran.stderr, ran.stopped_by) == (0, "", None)


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('words')", 1, "words\n"),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import atexit; atexit.register(lambda: print('bye')); import os", 0, ""),
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("x = (", 1, "SyntaxError: '(' was never closed\n"),
    ],
    ids=["number", "words", "negative", "exit hook", "exception", "syntax"],
)
def test_a_program_ends_as_it_would_from_a_shell(here: Here, code: str, exit_code: int, stderr: str) -> None:
    warm = here.python(code)
    cold = here.wait(here.sandbox.run(["python", "-B", "main.py"], files={"main.py": code}))
    assert warm.exit_code == cold.exit_code == exit_code
    assert warm.stderr.endswith(stderr)
    assert (warm.stdout, warm.stderr.replace(folder_of(warm), "")) == (
        cold.stdout,
        cold.stderr.replace(folder_of(cold), ""),
    )


def folder_of(ran: Ran) -> str:
    return ran.stderr.partition('File "')[2].rpartition("/main.py")[0] or "nowhere"


@pytest.mark.parametrize(
    ("argv", "stdout"),
    [
        (["python", "-c", "import sys; print(sys.argv, __name__)", "x"], "['-c', 'x'] __main__\n"),
        (["python", "-m", "tool", "x"], "['x'] __main__\n"),
        (["python", "-I", "-c", "print('isolated')"], "isolated\n"),
        (["sh", "-c", "echo shell; python -c 'print(1)'"], "shell\n1\n"),
    ],
    ids=["code", "module", "options", "shell"],
)
def test_other_programs_and_other_ways_to_call_python(here: Here, argv: list[str], stdout: str) -> None:
    tool = "import sys; print(sys.argv[1:], __name__)"
    ran = here.wait(here.sandbox.run(argv, files={"tool.py": tool}))
    assert (ran.stdout, ran.exit_code, ran.stderr) == (stdout, 0, "")


def test_a_program_that_does_not_exist_is_told_as_data(here: Here) -> None:
    ran = here.wait(here.sandbox.run(["no-such-program"]))
    assert (ran.exit_code, ran.stderr) == (127, "no-such-program: not found\n")


def test_unittest_and_installed_packages_work(everywhere: Here) -> None:
    body = "class T(unittest.TestCase):\n  def test(self): self.assertEqual(numpy.ones(3).sum(), 3)"
    test = f"import unittest, numpy\n{body}"
    ran = everywhere.wait(everywhere.sandbox.run(["python", "-m", "unittest", "test_it"], files={"test_it.py": test}))
    assert ran.stderr.endswith("OK\n"), ran


def test_processes_that_the_program_shares_work_with(here: Here) -> None:
    code = "import multiprocessing as m\nif __name__ == '__main__':\n  with m.Pool(2) as p: print(p.map(abs, [-1, -2]))"
    assert here.python(code, replace(QUICK, memory_bytes=2**28)).stdout == "[1, 2]\n"


def test_the_same_program_gives_the_same_answer(here: Here) -> None:
    assert len({here.python("print({'a', 'b', 'c', 'd'}, hash('x'))").stdout for _ in range(3)}) == 1


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a//b", "a\0b"])
def test_paths_that_leave_the_folder_are_refused(here: Here, name: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        here.wait(here.sandbox.run(["python", "-c", ""], files={name: ""}))
    with pytest.raises(ValueError, match="relative path"):
        here.wait(here.sandbox.run(["python", "-c", ""], collect=[name]))


def test_files_that_do_not_fit_are_refused(here: Here) -> None:
    with pytest.raises(ValueError, match="file_bytes=10"):
        here.wait(here.sandbox.run(["true"], files={"x": "y" * 11}, limits=Limits(file_bytes=10)))


# Sessions


def test_a_session_keeps_its_variables_and_shows_the_last_value(everywhere: Here) -> None:
    first, second, third, last = everywhere.cells("x = 20", "print('printed')\nx + 1", "None", "def f(): return x\nf()")
    assert [ran.stdout for ran in (first, second, third, last)] == ["", "printed\n21\n", "", "20\n"]
    assert {ran.exit_code for ran in (first, second, third, last)} == {0}


def test_an_exception_in_a_session_is_shown_with_its_line_and_harms_nothing(here: Here) -> None:
    ok, failed, syntax, left, after = here.cells("x = 1", "def f():\n    return x / 0\nf()", "x = = 2", "exit(2)", "x")
    assert failed.exit_code == 1
    assert 'File "<cell 2>", line 2, in f\n    return x / 0' in failed.stderr
    assert "infra" not in failed.stderr
    assert syntax.stderr.endswith("SyntaxError: invalid syntax\n")
    assert "infra" not in syntax.stderr
    assert (left.exit_code, after.stdout, ok.exit_code) == (1, "1\n", 0)


def test_a_session_is_over_once_its_process_has_gone(here: Here) -> None:
    gone, later = here.cells("import os\nprint('x')\nos._exit(0)", "1")
    assert (gone.exit_code, gone.stdout, gone.stopped_by) == (None, "x\n", None)
    assert later.exit_code is None
    assert "over" in later.stderr


def test_a_session_that_was_closed_answers_at_once(here: Here) -> None:
    async def closed() -> Ran:
        session = await here.sandbox.open()
        await session.close()
        await session.close()
        return await session.run("1")

    assert here.wait(closed()).exit_code is None


def test_output_of_each_piece_is_its_own(here: Here) -> None:
    async def many() -> list[str]:
        session = await here.sandbox.open()
        try:
            return [(await session.run(f"print({number})")).stdout for number in range(50)]
        finally:
            await session.close()

    assert here.wait(many()) == [f"{number}\n" for number in range(50)]


# Many at once, and the end


def test_no_more_programs_run_at_once_than_allowed() -> None:
    async def peak() -> int:
        sandbox = Sandbox(Kind.AUTO, programs=2, pool=2)
        try:
            stamp = "import time; print(time.time()); time.sleep(0.3); print(time.time())"
            runs = await asyncio.gather(*(sandbox.run(["python", "-c", stamp]) for _ in range(6)))
        finally:
            sandbox.close()
        spans = [tuple(map(float, ran.stdout.split())) for ran in runs]
        return max(sum(begin <= start < end for begin, end in spans) for start, _ in spans)

    assert asyncio.run(peak()) == 2


def test_many_callers_each_get_their_own_answer_while_the_loop_stays_free(here: Here) -> None:
    async def gathered() -> tuple[list[str], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        beating = asyncio.ensure_future(beat())
        runs = await asyncio.gather(*(here.sandbox.run(["python", "-c", f"print({n})"]) for n in range(12)))
        beating.cancel()
        return [ran.stdout for ran in runs], beats

    answers, beats = here.wait(gathered())
    assert answers == [f"{n}\n" for n in range(12)]
    assert beats >= 5


def test_a_caller_that_is_cancelled_takes_its_program_along(everywhere: Here) -> None:
    mark = f"sao-cancelled-{time.monotonic_ns()}"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])"

    async def cancelled() -> None:
        running = asyncio.ensure_future(everywhere.sandbox.run(["python", "-c", code]))
        while len(processes_with(mark)) < 1:
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    everywhere.wait(asyncio.wait_for(cancelled(), 20))
    assert gone(mark)
    assert everywhere.python("print(1)").stdout == "1\n"


@pytest.mark.parametrize("kind", [*KINDS, Kind.NONE])
def test_closing_leaves_no_process_descriptor_or_folder(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, count = set(children()), descriptors()

    async def use() -> None:
        sandbox = Sandbox(kind)
        await asyncio.gather(*(sandbox.run(["python", "-c", "open('x', 'w')"]) for _ in range(3)))
        await sandbox.open()
        sandbox.close()
        with pytest.raises(RuntimeError, match="closed"):
            await sandbox.run(["true"])

    def folders() -> set[Path]:
        return set(Path("/tmp").glob("sao-code-*"))

    left = folders()
    asyncio.run(use())
    assert set(children()) <= before
    assert descriptors() <= count
    deadline = time.monotonic() + 5
    while folders() - left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folders() - left


def test_a_waiting_box_that_died_harms_no_program() -> None:
    async def after_a_death() -> Ran:
        others = set(children())
        sandbox = Sandbox(Kind.AUTO, pool=1)
        try:
            await sandbox.isolation()
            (box,) = set(children()) - others
            os.kill(int(box), signal.SIGKILL)
            await asyncio.sleep(0.1)
            return await sandbox.run(["python", "-c", "print(1)"])
        finally:
            sandbox.close()

    assert asyncio.run(after_a_death()).stdout == "1\n"


def test_nothing_is_started_before_it_is_used() -> None:
    before = children()
    sandbox = Sandbox()
    assert children() == before
    sandbox.close()


# Which isolation


def test_bubblewrap_comes_first_and_namespaces_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.shutil, "which", lambda name: "/usr/bin/bwrap")
    assert isolation.ways(Kind.AUTO)[0].kind is Kind.BUBBLEWRAP
    assert isolation.ways(Kind.AUTO)[-1].kind is Kind.NAMESPACES
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)
    assert {way.kind for way in isolation.ways(Kind.AUTO)} == {Kind.NAMESPACES}


def test_without_isolation_nothing_runs_and_the_refusal_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_found", {})
    monkeypatch.setattr(isolation, "_BOOT", "raise SystemExit('no namespaces for you')")
    sandbox = Sandbox(Kind.AUTO)
    with pytest.raises(NoIsolation) as refused:
        asyncio.run(sandbox.run(["true"]))
    sandbox.close()
    for word in ("install bubblewrap", "user namespaces", "SAO_SANDBOX=none", "no namespaces for you"):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_running_unisolated_is_said_on_every_start(caplog: pytest.LogCaptureFixture) -> None:
    async def twice() -> None:
        sandbox = Sandbox(Kind.NONE)
        await sandbox.run(["true"])
        await sandbox.run(["true"])
        sandbox.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(twice())
    assert sum("unisolated" in record.message for record in caplog.records) == 2


def test_the_setting_takes_only_what_there_is_and_travels_to_children(tmp_path: Path) -> None:
    settings = Settings.from_environment({"SAO_SANDBOX": "namespaces"}, tmp_path)
    assert Settings.from_environment(settings.as_environment(), tmp_path).sandbox == Kind(settings.sandbox)
    assert Settings.from_environment({}, tmp_path).sandbox == Kind.AUTO
    with pytest.raises(
        SettingsError, match="SAO_SANDBOX must be one of auto, bubblewrap, namespaces, none: got chroot"
    ):
        Settings.from_environment({"SAO_SANDBOX": "chroot"}, tmp_path)


def test_doctor_says_which_isolation_works_here_and_how_fast() -> None:
    said = examine("auto")
    assert said.startswith(("bubblewrap", "namespaces"))
    assert " ms " in said


# Its parts


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_jumps_of_the_filter_stay_inside_it(machine: str) -> None:
    steps = seccomp.program(machine)
    for place, (code, true, false, _) in enumerate(steps):
        if code & 0x07 == 0x05:
            assert place + 1 + max(true, false) < len(steps)
    assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_a_machine_that_the_filter_does_not_know_has_none() -> None:
    assert seccomp.program("riscv64") == []


def test_frames_arrive_however_they_are_cut() -> None:
    data = wire.encode({"a": 1}, [b"xy", b""]) + wire.encode({"b": 2})
    for size in (1, 3, len(data)):
        reader = wire.Reader(100)
        frames = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
        assert [(header.get("a"), blobs) for header, blobs in frames] == [(1, [b"xy", b""]), (None, [])]


@pytest.mark.parametrize("data", [b"{}\n", b"[1]\n", b'{"blobs": [-1]}\n', b'{"blobs": [101]}\n', b"x" * 2_000_000])
def test_what_is_no_frame_is_not_believed(data: bytes) -> None:
    with pytest.raises(wire.Garbage):
        list(wire.Reader(100).feed(data))


def test_a_box_that_breaks_is_told_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> Ran:
        sandbox = Sandbox(Kind.AUTO, pool=0)
        try:
            await sandbox.isolation()
            monkeypatch.setattr(isolation, "_BOOT", "import sys; sys.exit('the box is broken')")
            return await sandbox.run([sys.executable])
        finally:
            sandbox.close()

    ran = asyncio.run(broken())
    assert (ran.exit_code, ran.stopped_by) == (None, StoppedBy.SANDBOX)
    assert "the box is broken" in ran.stderr
