"""`sao up`: everything of one machine, until Ctrl-C. Prefect, MLflow, and a worker for what people start in the UI.

sao up ─┬─ holds ─▶ prefect server ◀─ keeper      started again when one of them dies;
        ├─ holds ─▶ mlflow server  ◀─ keeper      gone when this process is, however it ends
        └─ holds ─▶ sao worker     ◀─ keeper          stops first, after its flow runs have kept checkpoints
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console

from infra.services import (
    MLFLOW,
    PREFECT,
    WORKER,
    WORKER_STOP_S,
    Service,
    ServiceFailed,
    flow_worker,
    mlflow_server,
    prefect_environment,
    prefect_server,
    processes,
    require_free,
    running,
)
from infra.settings import Settings

LOOK_EVERY_S = 1.0
BACK_OFF_S = (0.0, 1.0, 5.0, 30.0)
STEADY_S = 60.0
"""A service that has run for so long is started again at once when it dies."""

Starter = Callable[[], Service]


class AlreadyUp(Exception):
    """Another `sao up` serves this home; the message shows its links."""


@dataclass(frozen=True)
class ServiceState:
    """What `sao status` says of a service."""

    name: str
    url: str | None
    """None if it does not run."""
    processes: int
    memory_bytes: int
    """Proportional set size of its processes: shared pages count once."""


def up(settings: Settings, console: Console) -> None:
    """Start everything, say where it is, and keep it running until SIGINT or SIGTERM.

    Raises:
        AlreadyUp: it runs already in this home.
        ServiceFailed: something did not come up; what did is gone again.
    """
    stop = threading.Event()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup sao up &` outlives its terminal
        signal.signal(signal.SIGHUP, ask)
    with _only_one(settings):
        starters: dict[str, Starter] = {
            PREFECT: lambda: prefect_server(settings, settings.prefect_port),
            MLFLOW: lambda: mlflow_server(settings, settings.mlflow_port),
        }
        held: dict[str, Service] = {}
        for name, port in ((PREFECT, settings.prefect_port), (MLFLOW, settings.mlflow_port)):
            if running(settings, name) is None:
                require_free(name, port)
        try:
            with console.status("starting Prefect and MLflow …"):
                held |= _start_together(starters)
            with console.status("registering what can be started …"):
                register(settings, held[PREFECT], console)
            starters[WORKER] = lambda: flow_worker(settings, held[PREFECT].url)
            with console.status("starting the worker …"):
                held[WORKER] = starters[WORKER]()
            console.print(
                welcome({name: service.url for name, service in held.items()}), highlight=False, soft_wrap=True
            )
            _keep(settings, starters, held, stop, console)
        finally:
            _stop_everything(settings, held, console)


def register(settings: Settings, server: Service, console: Console) -> None:
    """Migrate the ledger, and make work pool, deployments and automation; in a process of its own, for its memory.

    Raises :class:`ServiceFailed`.
    """
    command = [sys.executable, "-m", "flows.cli", "bootstrap", "--working-dir", str(Path.cwd())]
    environment = {**os.environ, **settings.as_environment(), **prefect_environment(settings, server)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ServiceFailed(f"the deployments could not be registered: {done.stderr.strip() or done.stdout.strip()}")
    for line in done.stdout.splitlines():
        if line.startswith("made "):
            console.print(line, style="dim", highlight=False, markup=False)


def welcome(urls: Mapping[str, str]) -> str:
    """Where everything is, and what to click."""
    return (
        f"\nPrefect   {urls[PREFECT]}/v2/deployments\n"
        f"MLflow    {urls[MLFLOW]}\n\n"
        "Start a run:   Prefect → Deployments → train/tiny → Run → Custom run; change what you like → Submit\n"
        "A schedule:    Prefect → Deployments → adapt/nightly → switch its schedule on\n"
        "Compare runs:  MLflow → Model training → Experiments → tiny → select two runs → Compare\n\n"
        "Ctrl-C stops everything; runs keep a checkpoint. From another terminal: sao status, sao down."
    )


def down(settings: Settings, console: Console) -> bool:
    """Stop the `sao up` of this home and wait until it is gone; False if there is none."""
    supervisor = _supervisor(settings)
    if supervisor is None:
        return False
    with console.status(f"stopping (process {supervisor.pid}); runs keep a checkpoint …"):
        supervisor.terminate()
        while _supervisor(settings) is not None:
            time.sleep(0.1)
    return True


def service_states(settings: Settings) -> list[ServiceState]:
    """Each service of this home: whether it runs, where, and what it takes."""
    found = []
    for name in (PREFECT, MLFLOW, WORKER):
        members = processes(settings, name)
        url = running(settings, name) if members else None
        found.append(ServiceState(name, url, len(members), sum(_memory(member) for member in members)))
    return found


def supervisor_pid(settings: Settings) -> int | None:
    """The process id of the `sao up` of this home, if it runs."""
    supervisor = _supervisor(settings)
    return None if supervisor is None else supervisor.pid


def _start_together(starters: Mapping[str, Starter]) -> dict[str, Service]:
    """Start all at once; if one fails, none is left. Raises its error."""
    with ThreadPoolExecutor(len(starters)) as pool:
        futures = {name: pool.submit(start) for name, start in starters.items()}
    failures = [error for future in futures.values() if (error := future.exception())]
    if failures:
        for future in futures.values():
            if not future.exception():
                future.result().close()
        raise failures[0]
    return {name: future.result() for name, future in futures.items()}


def _keep(
    settings: Settings,
    starters: Mapping[str, Starter],
    held: dict[str, Service],
    stop: threading.Event,
    console: Console,
) -> None:
    """Start again what has died, sooner the first time than the fourth, until asked to stop."""
    deaths = dict.fromkeys(held, 0)
    started = dict.fromkeys(held, time.monotonic())
    while not stop.wait(LOOK_EVERY_S):
        for name in [name for name in held if running(settings, name) is None]:
            deaths[name] = 1 if time.monotonic() - started[name] > STEADY_S else deaths[name] + 1
            console.print(f"{name} has died and is started again", style="yellow")
            if stop.wait(BACK_OFF_S[min(deaths[name], len(BACK_OFF_S)) - 1]):
                return
            held[name].close()
            try:
                held[name] = starters[name]()
            except ServiceFailed as error:
                console.print(f"{error}", style="red", markup=False, highlight=False)
            started[name] = time.monotonic()


def _stop_everything(settings: Settings, held: Mapping[str, Service], console: Console) -> None:
    """The worker first: it leaves when its flow runs have kept their checkpoints. They need the servers for that."""
    if not held:
        return
    with console.status("stopping; runs keep a checkpoint …"):
        for name in (WORKER, MLFLOW, PREFECT):
            if name in held:
                members = processes(settings, name)
                held[name].close()
                psutil.wait_procs(members[:1], timeout=WORKER_STOP_S + 5.0)
    console.print("stopped")


@contextmanager
def _only_one(settings: Settings) -> Iterator[None]:
    """Hold the place of the one `sao up` of this home."""
    folder = settings.home / "services"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "up.lock", "a+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            urls = {name: running(settings, name) or "not up yet" for name in (PREFECT, MLFLOW)}
            raise AlreadyUp(f"sao up runs already (process {supervisor_pid(settings)}){welcome(urls)}") from None
        note = folder / "up.json"
        note.write_text(json.dumps({"pid": os.getpid()}))
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


def _supervisor(settings: Settings) -> psutil.Process | None:
    with suppress(FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
        folder = settings.home / "services"
        with open(folder / "up.lock", "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return psutil.Process(int(json.loads((folder / "up.json").read_text())["pid"]))
    return None


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0
