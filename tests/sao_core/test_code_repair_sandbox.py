"""Repairs, and what a policy might try instead, in the sandbox that runs have."""

import asyncio
from textwrap import dedent

import pytest
from code_repair_attempts import ATTEMPTS
from code_repair_fixtures import adding, bundled, call, environment, fixed, turns_of

from infra.sandbox.runner import Sandbox

SUBMIT = call("submit")


def looking(text):
    """An `add` that hands out what it could get hold of; what it looks for is what a hidden call comes to."""
    body = dedent(text).rstrip().replace("\n", "\n    ")
    head = (
        "import glob, os, re, socket, sys\n\nWANTED = str(90210 + 55555).encode()\n\n\ndef add(a, b):\n    found = None"
    )
    return {"adding.py": f"{head}{body}\n    return found or a - b\n"}


ESCAPES = {
    "environment": looking(
        """
        found = WANTED.decode() in str(os.environ)
        """
    ),
    "every process": looking(
        """
        for path in glob.glob("/proc/[0-9]*/*"):
            try:
                found = found or re.findall(WANTED, open(path, "rb").read())
            except OSError:
                pass
        """
    ),
    "memory of the parent": looking(
        """
        try:
            memory = open(f"/proc/{os.getppid()}/mem", "rb")
            for line in open(f"/proc/{os.getppid()}/maps"):
                start, stop = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(start)
                found = found or re.findall(WANTED, memory.read(stop - start))
        except OSError:
            pass
        """
    ),
    "files": looking(
        """
        for folder, _, names in os.walk("/tmp"):
            for name in () if folder.startswith(sys.prefix) else names:  # Python's own files may lie there
                try:
                    found = found or re.findall(WANTED, open(os.path.join(folder, name), "rb").read())
                except OSError:
                    pass
        """
    ),
    "network": looking(
        """
        for address in (("127.0.0.1", 22), ("127.0.0.1", 80), ("1.1.1.1", 53)):
            try:
                socket.create_connection(address, timeout=0.2)
                found = "a connection"
            except OSError:
                pass
        """
    ),
    "the parent killed": looking(
        """
        for number in (1, os.getppid()):
            try:
                os.kill(number, 9)
            except OSError:
                pass
        """
    ),
}


@pytest.fixture
def sandbox():
    made = Sandbox()
    yield made
    made.close()


async def last(sandbox, task, turns, **options):
    playing = environment(sandbox, **options)
    await playing.reset(task)
    results = [await playing.step(turn) for turn in turns]
    await playing.close()
    return results[-1]


async def judged(sandbox, attempts):
    tries = [last(sandbox, adding(), [*turns_of(changes), SUBMIT], test_wall_s=4) for changes in attempts.values()]
    return dict(zip(attempts, await asyncio.gather(*tries), strict=True))


def test_nothing_can_be_found_or_broken_from_within(sandbox):
    """The answers are those of the wrong code, so whatever was looked for was not there."""
    results = asyncio.run(asyncio.wait_for(judged(sandbox, ESCAPES), 120))
    passed = {name: result.info["reward_parts"]["hidden_passed"] for name, result in results.items()}
    assert passed == dict.fromkeys(ESCAPES, 0.25)
    assert {result.reward for result in results.values()} == {0.0}


@pytest.mark.long
def test_every_attempt_earns_nothing(sandbox):
    results = asyncio.run(asyncio.wait_for(judged(sandbox, ATTEMPTS), 240))
    assert {name for name, result in results.items() if result.reward or not result.terminated} == set()


def test_a_bundled_task_is_tested_and_mended_in_the_sandbox(sandbox):
    task = bundled("train/1")
    path, text = fixed(task)

    async def episode():
        playing = environment(sandbox)
        await playing.reset(task)
        shadow = call("write_file", path="json.py", content="raise SystemExit")
        fix = call("write_file", path=path, content=text)
        turns = [call("run_tests"), shadow + fix, call("run_tests"), SUBMIT]
        return [await playing.step(turn) for turn in turns]

    before, _, after, end = asyncio.run(asyncio.wait_for(episode(), 60))
    assert "FAIL tests/" in before.observation[0].content
    assert after.observation[0].content.endswith("tests, 0 failed")
    assert end.reward == 1.0
