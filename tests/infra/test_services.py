"""Local servers: shared by who needs them, gone with the last user however it ends, silent in the terminal."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from child_targets import lives

from infra import services
from infra.services import ServiceFailed, mlflow_server
from infra.settings import Settings

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

USE_FAKE = """
import sys, time
from pathlib import Path
from infra import services
from infra.settings import Settings
settings = Settings.from_environment({"SAO_HOME": sys.argv[1]})
service = services._service(
    "fake", settings, port=None, health="/", environment=lambda port: {}, defaults={}, unset=(),
    command=lambda port: [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)],
)
print(service.url, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def settings(tmp_path):
    return Settings.from_environment({"SAO_HOME": str(tmp_path)}, tmp_path)


def fake(settings, command=None, health="/", port=None):
    """A server that is up in a moment."""
    command = command or ("-m", "http.server", "--bind", "127.0.0.1")
    return services._service(
        "fake",
        settings,
        port=port,
        health=health,
        environment=lambda _: {},
        defaults={},
        unset=(),
        command=lambda port: [sys.executable, *command, str(port)],
    )


def up(url):
    return services._healthy(int(url.rpartition(":")[2]), "/")


def eventually(condition, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_a_server_serves_until_its_last_user_leaves(settings):
    first = fake(settings)
    second = fake(settings)
    assert first.url == second.url
    first.close()
    time.sleep(0.6)
    assert up(second.url)
    second.close()
    second.close()
    eventually(lambda: not up(second.url))
    eventually(lambda: not (settings.home / "services" / "fake.json").exists())


def test_users_that_come_at_once_get_one_server(settings):
    with ThreadPoolExecutor(4) as pool:
        users = list(pool.map(lambda _: fake(settings), range(4)))
    assert len({user.url for user in users}) == 1
    for user in users:
        user.close()
    eventually(lambda: not up(users[0].url))


def test_a_user_that_comes_while_the_server_is_going_gets_a_new_one(settings):
    for _ in range(3):
        with fake(settings) as service:
            assert up(service.url)
        time.sleep(0.2)


@pytest.mark.parametrize("end", ["exit", signal.SIGTERM, signal.SIGKILL])
def test_the_server_is_gone_however_its_user_ends(tmp_path, end):
    user = subprocess.Popen(
        [sys.executable, "-c", USE_FAKE, str(tmp_path)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    url = user.stdout.readline().strip()
    assert up(url)
    if end == "exit":
        user.communicate("\n")
    else:
        user.send_signal(end)
        user.communicate()
    eventually(lambda: not up(url), within_s=2)


def test_a_dead_server_is_replaced(settings):
    with fake(settings) as first:
        os.kill(json.loads((settings.home / "services" / "fake.json").read_text())["keeper_pid"], signal.SIGTERM)
        eventually(lambda: not up(first.url))
        with fake(settings) as second:
            assert up(second.url)


def test_what_the_user_has_set_for_prefect_stays(settings, monkeypatch):
    monkeypatch.setenv("PREFECT_API_REQUEST_TIMEOUT", "77")
    environment = services.prefect_environment(settings, None)
    assert "PREFECT_API_REQUEST_TIMEOUT" not in environment
    assert "PREFECT_API_URL" not in environment
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_a_server_that_does_not_come_up_says_why_and_leaves_nothing(settings):
    with pytest.raises(ServiceFailed, match=r"(?s)ended while starting; the end of .*fake-server.log:\nno such luck"):
        fake(settings, ("-c", "import sys; sys.exit('no such luck')"))
    with fake(settings) as service:
        assert up(service.url)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""

KEEP = """
import sys
from pathlib import Path
from infra import keeper
keeper.keep(Path(sys.argv[1]), Path(sys.argv[2]), 0.3, [sys.executable, "-c", *sys.argv[3:]])
"""


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    with open(tmp_path / "lock", "ab") as user:
        fcntl.flock(user, fcntl.LOCK_SH)
        arguments = [tmp_path / "lock", tmp_path / "port", STUBBORN, pid_file]
        keeper = subprocess.Popen([sys.executable, "-c", KEEP, *map(str, arguments)], env=ENVIRONMENT)
        eventually(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    assert keeper.wait(5) == 0
    eventually(lambda: not lives(int(pid_file.read_text())))


FLOW = """
import os, sys
from infra.services import prefect_environment, prefect_server
from infra.settings import Settings
settings = Settings.from_environment({"SAO_HOME": sys.argv[1]})
server = prefect_server(settings)
os.environ.update(prefect_environment(settings, server))
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

@task(cache_policy=NO_CACHE)
def update(step):
    return step

@flow
def train():
    assert [update(step) for step in range(5)] == list(range(5))
    return flow_run.id

train(return_state=True)
with get_client(sync_client=True) as client:
    print(server.url, os.environ["PREFECT_HOME"], client.read_flow_runs()[0].state_name)
"""


def test_a_flow_runs_on_the_local_prefect_server_and_the_terminal_stays_clean(tmp_path):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", FLOW, str(tmp_path)],
        env={**ENVIRONMENT, "HOME": str(tmp_path / "user")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    url, home, state = done.stdout.split()
    assert (home, state) == (str(tmp_path / "prefect"), "Completed")
    assert (tmp_path / "prefect" / "prefect.db").exists()
    assert not (tmp_path / "user").exists(), "the user's own Prefect state was touched"
    eventually(lambda: not up(url), within_s=10)
    assert time.monotonic() - start < 200


def test_the_local_mlflow_server_serves_the_tracking_store(settings):
    from mlflow import MlflowClient

    with mlflow_server(settings) as server:
        MlflowClient(server.url).create_experiment("seen through the server")
        assert MlflowClient(settings.tracking_uri).get_experiment_by_name("seen through the server") is not None
    eventually(lambda: not services._healthy(int(server.url.rpartition(":")[2]), "/health"), within_s=10)
