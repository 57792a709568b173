import sys

import psutil
import pytest

from sao_core.environments.side_process import SideProcess, SideProcessFailed

ECHO = """
import os, pickle, sys
kept = []
while True:
    try:
        number, request = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if request == "leave":
        os._exit(3)
    if request == "later":
        kept.append(number)
        continue
    error = "it will not" if request == "raise" else None
    for each in [*kept, number]:
        pickle.dump((each, request, error), sys.stdout.buffer)
        kept = []
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def echo():
    return SideProcess([sys.executable, "-c", ECHO])


def test_answers_come_to_who_asked_in_any_order(echo):
    assert echo.pid is None
    later, now = echo.ask("later"), echo.ask({"a": [1, 2]})
    assert now.result(10) == {"a": [1, 2]}
    assert later.result(10) == {"a": [1, 2]}


def test_what_it_raises_is_said(echo):
    with pytest.raises(SideProcessFailed, match="it will not"):
        echo.ask("raise").result(10)
    assert echo.ask("on").result(10) == "on"


def test_a_process_that_ends_fails_what_it_owes_and_is_replaced(echo):
    owed, last = echo.ask("later"), echo.ask("leave")
    for future in (owed, last):
        with pytest.raises(SideProcessFailed, match="ended with exit code 3"):
            future.result(10)
    first = echo.pid
    assert echo.ask("on").result(10) == "on"
    assert echo.pid != first
    process = psutil.Process(echo.pid)
    process.kill()
    psutil.wait_procs([process], timeout=5)
    assert echo.ask("on").result(10) == "on"


def test_a_program_that_cannot_serve_fails_every_request():
    silent = SideProcess([sys.executable, "-c", "print('no pickle')"])
    for _ in range(3):
        with pytest.raises(SideProcessFailed, match="ended with exit code"):
            silent.ask("x").result(10)


def test_an_answer_of_a_class_that_is_not_here_fails_the_request():
    program = (
        "import pickle, sys, types\n"
        "number, _ = pickle.load(sys.stdin.buffer)\n"
        "there = sys.modules['only_there'] = types.ModuleType('only_there')\n"
        "exec('class Answer: pass', there.__dict__)\n"
        "pickle.dump((number, there.Answer(), None), sys.stdout.buffer)\n"
        "sys.stdout.buffer.flush()\n"
        "sys.stdin.read()\n"
    )
    with pytest.raises(SideProcessFailed):
        SideProcess([sys.executable, "-c", program]).ask("x").result(10)


def test_large_requests_and_answers_pass_each_other(echo):
    big = b"x" * 2_000_000
    futures = [echo.ask(big) for _ in range(5)]
    assert [len(future.result(20)) for future in futures] == [len(big)] * 5


def test_it_ends_with_its_owner(echo):
    echo.ask("on").result(10)
    pid = echo.pid
    process = SideProcess([sys.executable, "-c", ECHO])
    process.ask("on").result(10)
    other = process.pid
    del process
    assert not psutil.pid_exists(other)
    assert psutil.pid_exists(pid)
