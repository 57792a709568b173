"""Programs under their guard: what they are given, what is left of them, and that nothing outlives anything."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from infra.agent_process import AgentPrograms
from sao_core.agent_programs import ProgramEnded

PYTHON = ["python", "-I", "-S", "-c"]


def ran(
    command: Sequence[str], task: Mapping[str, object] | None = None, folder: Path | None = None, **variables: str
) -> ProgramEnded:
    async def run() -> ProgramEnded:
        async with AgentPrograms(folder).start(command, task or {}, variables) as program:
            return await program.wait()

    return asyncio.run(run())


def gone(pids: Sequence[int], within_s: float = 5) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.02)
    return False


def written(path: Path, lines: int) -> list[int]:
    """Process ids that a program writes to a file, once there are so many."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and len(found := path.read_text().split()) == lines:
            return [int(pid) for pid in found]
        time.sleep(0.02)
    raise AssertionError(f"no {lines} process ids in {path}")


def test_a_program_gets_its_task_in_a_fresh_folder_and_leaves_a_result(tmp_path: Path) -> None:
    code = """
import json, os, sys
print(json.load(open(os.environ["SAO_TASK"]))["question"], os.environ["OPENAI_MODEL"], sys.argv[1])
open("scratch", "w").close()
json.dump(sorted(os.listdir()) + [os.getcwd()], open(os.environ["SAO_RESULT"], "w"))
print("done", file=sys.stderr)
"""
    ended = ran([*PYTHON, code, "-x"], {"question": "wieviel ist ½ + 1?"}, OPENAI_MODEL="policy")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "wieviel ist ½ + 1? policy -x\n", "done\n")
    *files, folder = json.loads(ended.result or "")
    assert files == ["scratch", "task.json"]
    assert not Path(folder).exists()


def test_words_that_name_a_file_are_taken_from_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "mine.py").write_text("import sys; print(sys.argv, sys.executable)")
    ended = ran(["python", "agents/mine.py", "agents", "mine.py"], folder=tmp_path)
    assert ended.stdout == f"{[str(tmp_path / 'agents' / 'mine.py'), 'agents', 'mine.py']} {sys.executable}\n"


def test_keys_and_places_of_this_installation_are_not_handed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SAO_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("MY_SEARCH_KEY", "kept")
    monkeypatch.setenv("NO_PROXY", "intern")
    seen = json.loads(ran([*PYTHON, "import json, os; print(json.dumps(dict(os.environ)))"]).stdout)
    assert "secret" not in seen.values()
    assert {name for name in seen if name.startswith("SAO_")} == {"SAO_TASK", "SAO_RESULT"}
    assert (seen["MY_SEARCH_KEY"], seen["NO_PROXY"]) == ("kept", "intern,127.0.0.1,localhost")


@pytest.mark.parametrize(
    ("command", "exit_code", "words", "problem"),
    [
        ([*PYTHON, "import sys; sys.exit('boom')"], 1, "boom", None),
        (["sh", "-c", "kill -9 $$"], -9, "", None),
        (["nowhere"], None, "", "nowhere: No such file or directory"),
        (["/etc"], None, "", "/etc: Permission denied"),
    ],
    ids=["error", "signal", "missing", "folder"],
)
def test_how_a_program_ended_is_data(
    command: list[str], exit_code: int | None, words: str, problem: str | None
) -> None:
    ended = ran(command)
    assert (ended.exit_code, ended.last_words, ended.problem) == (exit_code, words, problem)


def test_endless_output_is_read_and_only_its_end_is_kept() -> None:
    ended = ran([*PYTHON, "import sys\nfor n in range(200000): print(n)\nsys.stderr.write('e' * 10**6)"])
    assert ended.exit_code == 0
    assert ended.stdout.endswith("199998\n199999\n")
    assert (len(ended.stdout), len(ended.stderr)) == (16384, 16384)


SPAWNS = "setsid sleep 600 & echo $! >>{0}; sleep 600 & echo $! >>{0}; echo $$ >>{0}; "


def test_what_a_program_started_ends_with_it(tmp_path: Path) -> None:
    ended = ran(["sh", "-c", SPAWNS.format(tmp_path / "pids") + "exit 3"])
    assert ended.exit_code == 3
    assert gone(written(tmp_path / "pids", 3), within_s=0.5)


@pytest.mark.parametrize("end", ["stop", "leave", "cancel"])
def test_a_program_that_is_stopped_is_gone_with_all_that_it_started(tmp_path: Path, end: str) -> None:
    pids = tmp_path / "pids"

    async def run() -> ProgramEnded | None:
        async with AgentPrograms().start(["sh", "-c", SPAWNS.format(pids) + "echo so far; wait"], {}, {}) as program:
            await asyncio.to_thread(written, pids, 3)
            if end == "cancel":
                await program.wait()
            return await program.stop() if end == "stop" else None

    async def cancelled() -> ProgramEnded | None:
        task = asyncio.ensure_future(run())
        await asyncio.to_thread(written, pids, 3)
        if end == "cancel":
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            return None
        return await task

    ended = asyncio.run(cancelled())
    assert gone(written(pids, 3), within_s=0.5)
    if end == "stop":
        assert ended is not None
        assert (ended.exit_code, ended.stdout) == (None, "so far\n")


WORKER = """
import asyncio, sys
from infra.agent_process import AgentPrograms

async def main():
    async with AgentPrograms().start(["sh", "-c", sys.argv[1]], {}, {}) as program:
        await program.wait()

asyncio.run(main())
"""


def kill_worker(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()


def kill_guard_too(worker: subprocess.Popen[bytes]) -> None:
    (guard,) = psutil.Process(worker.pid).children()
    guard.kill()


@pytest.mark.parametrize("end", [kill_worker, kill_guard_too], ids=["worker", "guard"])
def test_a_killed_worker_leaves_no_program_and_no_folder(
    tmp_path: Path, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    pids, place = tmp_path / "pids", tmp_path / "place"
    script = f"pwd >{place}; echo $$ >>{pids}; sleep 600"
    variables = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", WORKER, script], env=variables)
    try:
        program = written(pids, 1)
        end(worker)
        assert gone(program)
        if end is kill_worker:
            deadline = time.monotonic() + 5
            while Path(place.read_text().strip()).exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
