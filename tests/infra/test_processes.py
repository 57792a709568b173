"""Real processes, really killed."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import child_targets
import pytest
from child_targets import lives

from infra.processes import ChildFailed, ChildGroup


@pytest.fixture
def group(tmp_path):
    with ChildGroup(tmp_path / "logs") as group:
        yield group
        group.close(0)


PATH = os.pathsep.join([str(Path(child_targets.__file__).parent), *sys.path])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH}


def eventually(condition, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_a_command_returns_the_childs_report(group):
    group.start("learner", child_targets.adder)
    assert group.command("learner", "add", {"a": 2, "b": 3}) == 5
    assert group.command("learner", "add", {"a": "x", "b": "y"}) == "xy"


def test_what_goes_on_alongside_does_not_keep_the_child_waiting(group):
    group.start("learner", child_targets.adder)
    assert group.command("learner", "add", {"a": 0, "b": 0}) == 0
    begun = time.monotonic()
    done: list[str] = []

    def alongside() -> None:
        time.sleep(0.5)
        done.append("alongside")

    assert group.command("learner", "slow", {"seconds": 0.5, "value": "report"}, alongside=alongside) == "report"
    assert done == ["alongside"]
    assert time.monotonic() - begun < 0.95


def test_an_exception_that_no_restart_mends_ends_the_wait_at_once(group):
    group.start("rollout-0", child_targets.adder, restarts=3, fatal=("builtins.ArithmeticError",))
    with pytest.raises(ChildFailed, match="not again"):
        group.command("rollout-0", "fail", {"message": "not again"})
    assert group.restarted("rollout-0") == 0


def test_arguments_are_rebuilt_by_the_targets_annotations(group, tmp_path):
    place = child_targets.Place(tmp_path, 41)
    group.start("learner", "child_targets:typed", {"place": place, "names": ("a",)})
    assert group.command("learner", "show") == [type(tmp_path).__name__, str(tmp_path), 42, "tuple"]


def test_a_child_imports_neither_the_parents_main_nor_prefect_mlflow_or_torch(group):
    import prefect  # noqa: F401  the parent has it, the child must not

    group.start("learner", child_targets.adder, threads=3)
    modules = set(group.command("learner", "modules"))
    assert not modules & {"prefect", "mlflow", "torch", "pytest", "_pytest", "numpy", "multiprocessing"}
    assert group.command("learner", "env", {"key": "OMP_NUM_THREADS"}) == "3"


def test_a_childs_exception_reaches_the_parent_with_its_traceback_within_a_second(group):
    group.start("learner", child_targets.adder)
    assert group.command("learner", "add", {"a": 1, "b": 1}) == 2
    start = time.monotonic()
    with pytest.raises(ChildFailed) as caught:
        group.command("learner", "fail", {"message": "loss is nan"})
    assert time.monotonic() - start < 1
    error = caught.value
    assert str(error).startswith("learner failed: ArithmeticError: loss is nan")
    assert error.kind == "builtins.ArithmeticError"
    assert 'child_targets.py", line' in error.traceback
    assert "in _fail" in error.traceback


def test_another_childs_exception_ends_the_wait_for_a_report(group):
    group.start("learner", child_targets.adder)
    group.command("learner", "add", {"a": 1, "b": 1})
    group.start("rollout-0", child_targets.broken)
    start = time.monotonic()
    with pytest.raises(ChildFailed, match="rollout-0 failed: ValueError: incarnation 0 cannot start"):
        group.command("learner", "slow", {"seconds": 20, "value": 1})
    assert time.monotonic() - start < 1.5


def test_a_killed_child_is_noticed_within_a_second(group):
    group.start("learner", child_targets.adder)
    group.start("rollout-0", child_targets.worker)
    eventually(lambda: group.progress("rollout-0"))
    os.kill(group.alive()["rollout-0"], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ChildFailed, match="rollout-0 was killed by SIGKILL") as caught:
        group.command("learner", "slow", {"seconds": 20, "value": 1})
    assert time.monotonic() - start < 1
    assert caught.value.exitcode == -signal.SIGKILL


def test_a_native_crash_shows_the_end_of_the_log(group):
    group.start("learner", child_targets.segfault)
    with pytest.raises(ChildFailed, match=r"(?s)was killed by SIGSEGV; the end of .*Fatal Python error"):
        group.command("learner", "add")


def test_a_target_that_does_not_exist_or_does_not_fit_fails_with_the_reason(group):
    group.start("learner", "child_targets:nothing")
    with pytest.raises(ChildFailed, match="has no attribute 'nothing'"):
        group.watch(5)
    with ChildGroup(Path(group._log_folder)) as other:
        other.start("learner", child_targets.job, {"wrong": 1})
        with pytest.raises(ChildFailed, match="missing a required argument: 'value'"):
            other.join("learner")


def test_an_unknown_command_names_the_known_ones(group):
    group.start("learner", child_targets.adder)
    with pytest.raises(ChildFailed, match="no command 'ad'; there are: add, env, fail, modules, slow"):
        group.command("learner", "ad")


def test_what_on_wait_raises_ends_the_wait_and_the_late_report_is_dropped(group):
    group.start("learner", child_targets.adder)
    start = time.monotonic()

    def stop_after_a_moment():
        if time.monotonic() - start > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.command("learner", "slow", {"seconds": 1.0, "value": "late"}, on_wait=stop_after_a_moment, poll_s=0.05)
    assert group.command("learner", "slow", {"seconds": 0, "value": "mine"}) == "mine"
    assert group._children["learner"].reports == {}


def test_a_signal_that_raises_in_the_middle_of_a_wait_leaves_the_group_usable(group):
    group.start("learner", child_targets.adder)
    group.command("learner", "add", {"a": 1, "b": 1})

    def terminate(*_):
        raise SystemExit(143)

    before = signal.signal(signal.SIGALRM, terminate)
    try:
        for delay in (0.001, 0.01, 0.05, 0.2):
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(SystemExit):
                group.command("learner", "slow", {"seconds": 0.3, "value": "late"}, poll_s=5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert group.command("learner", "add", {"a": 2, "b": 3}) == 5


def test_restarts_happen_within_the_budget_and_then_the_traceback_is_raised(group, caplog):
    group.start("rollout-0", child_targets.broken, restarts=2)
    with caplog.at_level(logging.WARNING), pytest.raises(ChildFailed) as caught:
        group.join("rollout-0")
    assert "incarnation 2 cannot start" in caught.value.traceback
    assert group.restarted("rollout-0") == 2
    assert [record.message.split(":")[0] for record in caplog.records] == ["restart 1 of 2", "restart 2 of 2"]


def test_deaths_outside_the_window_do_not_count(group):
    group.start("rollout-0", child_targets.worker, restarts=1, restart_window_s=0.2)
    for incarnation in range(3):
        eventually(lambda n=incarnation: group.watch() or group.progress("rollout-0").get("incarnation") == n)
        time.sleep(0.25)
        os.kill(group.alive()["rollout-0"], signal.SIGKILL)
    eventually(lambda: group.watch() or group.restarted("rollout-0") == 3)


def test_a_restarted_child_serves_again(group):
    group.start("rollout-0", child_targets.breaks_once, restarts=1)
    eventually(lambda: group.watch() or group.restarted("rollout-0") == 1)
    assert group.command("rollout-0", "incarnation") == 1


def test_a_command_that_dies_with_its_child_fails_even_if_the_child_is_restarted(group):
    group.start("learner", child_targets.adder, restarts=1)
    with pytest.raises(ChildFailed, match="loss is nan") as caught:
        group.command("learner", "fail", {"message": "loss is nan"})
    assert "in _fail" in caught.value.traceback
    assert group.command("learner", "add", {"a": 1, "b": 2}) == 3


def test_a_job_returns_its_result_and_its_end_is_no_failure(group):
    group.start("evaluate", child_targets.job, {"value": 21}, job=True)
    assert group.join("evaluate") == 42
    group.watch()
    group.start("evaluate", child_targets.job, {"value": 4}, job=True)
    assert group.join("evaluate") == 8


def test_a_worker_that_ends_by_itself_has_failed(group):
    group.start("rollout-0", child_targets.job, {"value": 1})
    with pytest.raises(ChildFailed, match="rollout-0 ended although nobody asked it to"):
        group.join("rollout-0")


def test_close_lets_children_finish_and_keeps_their_results(tmp_path):
    group = ChildGroup(tmp_path)
    group.start("learner", child_targets.learner, {"folder": tmp_path})
    group.start("rollout-0", child_targets.worker)
    eventually(lambda: group.progress("rollout-0"))
    assert group.close(grace_s=10) == []
    assert (tmp_path / "checkpoint").read_text() == "complete"
    assert group.join("learner") == {"step": 12}
    assert group.alive() == {}
    with pytest.raises(RuntimeError, match="the group is closed"):
        group.start("late", child_targets.worker)


def test_close_kills_what_does_not_leave(tmp_path):
    group = ChildGroup(tmp_path)
    group.start("deaf", child_targets.deaf)
    group.start("rollout-0", child_targets.worker)
    eventually(lambda: group.progress("rollout-0"))
    pid = group.alive()["deaf"]
    start = time.monotonic()
    assert group.close(grace_s=0.5) == ["deaf"]
    assert time.monotonic() - start < 2
    assert not lives(pid)


def test_a_frozen_child_does_not_hold_the_close(tmp_path):
    group = ChildGroup(tmp_path)
    group.start("rollout-0", child_targets.worker)
    eventually(lambda: group.progress("rollout-0"))
    os.kill(group.alive()["rollout-0"], signal.SIGSTOP)
    assert group.close(grace_s=0.3) == ["rollout-0"]


@pytest.fixture
def parent(tmp_path):
    """A parent process, leader of its own group, with the process ids of its three children."""
    process = subprocess.Popen(
        [sys.executable, child_targets.__file__, str(tmp_path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    pids = json.loads(process.stdout.readline())
    yield process, pids
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_sigkill_of_the_parent_ends_rollouts_at_once_and_lets_the_learner_checkpoint(parent, tmp_path):
    process, pids = parent
    process.kill()
    eventually(lambda: not lives(pids["rollout-0"]) and not lives(pids["rollout-1"]), within_s=1)
    eventually(lambda: not lives(pids["learner"]), within_s=3)
    assert (tmp_path / "checkpoint").read_text() == "complete"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_children_ignore_sigterm_and_sigint(parent, number):
    process, pids = parent
    for pid in pids.values():
        os.kill(pid, number)
    time.sleep(0.3)
    assert all(lives(pid) for pid in pids.values())
    assert process.poll() is None


def test_a_signal_to_the_group_right_at_the_start_does_not_reach_the_child(tmp_path):
    """The parent ignores it here; the child must survive however early in its life it comes."""
    script = (
        "import os, signal, sys, pathlib, child_targets\n"
        "from infra.processes import ChildGroup\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "with ChildGroup(pathlib.Path(sys.argv[1])) as group:\n"
        "    group.start('learner', child_targets.adder)\n"
        "    for _ in range(300): os.killpg(0, signal.SIGTERM)\n"
        "    print(group.command('learner', 'add', {'a': 1, 'b': 2}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
