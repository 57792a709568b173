"""What can be started from the Prefect UI and on schedules: one list, registered by `sao up` and `sao bootstrap`.

`prefect.yaml` at the top of the project is written from the same list (`python -m flows.deployments > prefect.yaml`),
for teams that deploy with `prefect deploy`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from flows.recipes import load_config, recipe_names, recipe_summary
from infra.services import WORK_POOL
from infra.settings import Settings

NIGHTLY = "0 2 * * *"
UPKEEP_EVERY_S = 6 * 3600
SCHEDULE_FIELDS = {"schedule", "active", "parameters", "slug", "max_scheduled_runs"}
ZOMBIES = "sao: flow runs that vanished"
TRAINING = "training"
"""The work queue of what trains. It has room for one: a run that is asked for while another one goes on waits for its
end. (A limit on the deployment would do the same by a lease, and Prefect kills a run that cannot renew it in time.)"""
SILENT_S = 300
"""A flow run says every 30 s that it lives; silent for this long, it is called Crashed. (If it lives after all, its end
still becomes its state.)"""


@dataclass(frozen=True)
class Deployment:
    """A flow that can be started from the UI, with the parameters that its form begins with."""

    name: str
    entrypoint: str
    """``module:function``, importable wherever the package is installed."""
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    queue: str = "default"
    """Work queue of the pool: `sao worker` takes all, `sao worker --queue rollout` only what is for extra machines."""
    cron: str | None = None
    interval_s: int | None = None
    active: bool = True
    """Whether the schedule is on from the start; people switch it in the UI."""


def deployments() -> list[Deployment]:
    """Everything that can be started."""
    return [
        *(
            Deployment(
                name,
                "flows.train:train",
                f"{recipe_summary(name)} Change what you like in the form and start it.",
                {"config": _config(name)},
                ("train", name),
                queue=TRAINING,
            )
            for name in recipe_names()
        ),
        Deployment(
            "resume",
            "flows.train:resume",
            "Go on with a run that was cancelled, failed or was interrupted, from its newest checkpoint.",
            {"changes": []},
            ("train",),
            queue=TRAINING,
        ),
        Deployment(
            "nightly",
            "flows.adapt:adapt",
            "Nightly training that starts from the newest promoted model, and promotes what it made of it if that is "
            "no worse. Switch its schedule on when it is what you want.",
            {"config": _config("tiny", "learner.updates=40"), "promote": True},
            ("train", "scheduled"),
            queue=TRAINING,
            cron=NIGHTLY,
            active=False,
        ),
        Deployment(
            "rollout-workers",
            "flows.rollout:rollout",
            "More rollout workers for a run that is being trained, on the machine whose worker takes this.",
            {"workers": 1},
            ("rollout",),
            queue="rollout",
        ),
        Deployment(
            "evaluate",
            "flows.evaluate:evaluate",
            "Evaluate a model on held-out prompts: a folder, `run:RUN@STEP`, or, as it stands here, the newest "
            "promoted one of the recipe `tiny`.",
            {"config": _config("tiny", "model.path=models:/tiny@champion", "warm_start.enabled=false")},
            ("evaluate",),
        ),
        Deployment(
            "study",
            "flows.study:study",
            "Compare variants of a training over several seeds; its runs stand side by side in MLflow.",
            {
                "config": _config("tiny"),
                "name": "sao-or-grpo",
                "variants": {"sao": [], "grpo": ["algorithm.name=grpo"]},
                "seeds": [0, 1, 2],
            },
            ("study",),
            queue=TRAINING,
        ),
        Deployment(
            "upkeep",
            "flows.upkeep:upkeep",
            "Expire leases, mark interrupted runs, and remove what nothing refers to; safe beside live runs.",
            {"dry_run": False},
            ("upkeep", "scheduled"),
            interval_s=UPKEEP_EVERY_S,
        ),
    ]


def deploy(settings: Settings, say: Callable[[str], None], working_dir: Path | None = None) -> None:
    """Make work pool, deployments and automation at ``settings.prefect_api_url``; what is there already stays.

    A deployment that people changed in the UI (schedule, parameters, limit) is replaced only when a version of this
    package brings another one; its schedules stay even then. ``working_dir``: where flow runs find relative paths.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(WORK_POOL)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
            say(f"work pool {WORK_POOL}")
        if TRAINING not in {queue.name for queue in client.read_work_queues(work_pool_name=WORK_POOL)}:
            client.create_work_queue(name=TRAINING, work_pool_name=WORK_POOL, concurrency_limit=1)
            say(f"work queue {TRAINING}: one at a time")
        for deployment in deployments():
            if _register(client, deployment, working_dir):
                say(f"deployment {deployment.name}")
        if _watch_for_zombies(client):
            say(f"automation “{ZOMBIES}”")


def _register(client: Any, deployment: Deployment, working_dir: Path | None) -> bool:
    """Create or replace a deployment; False if it is there as this version makes it."""
    from prefect.deployments.runner import RunnerDeployment
    from prefect.exceptions import ObjectNotFound
    from prefect.schedules import Cron, Interval
    from prefect.types.entrypoint import EntrypointType

    module, _, function = deployment.entrypoint.partition(":")
    flow = getattr(import_module(module), function)
    fingerprint = _fingerprint(deployment, flow, working_dir)
    try:
        present = client.read_deployment_by_name(f"{flow.name}/{deployment.name}")
    except ObjectNotFound:
        present = None
    if present is not None and present.version == fingerprint:
        return False
    schedules: dict[str, Any] = {}
    if present is None and deployment.cron:
        schedules["schedule"] = Cron(deployment.cron, active=deployment.active)
    elif present is None and deployment.interval_s:
        every = timedelta(seconds=deployment.interval_s)
        schedules["schedule"] = Interval(every, active=deployment.active)
    made = RunnerDeployment.from_flow(
        flow,
        deployment.name,
        parameters=dict(deployment.parameters),
        description=deployment.description,
        tags=list(deployment.tags),
        version=fingerprint,
        work_pool_name=WORK_POOL,
        work_queue_name=deployment.queue,
        job_variables={"working_dir": str(working_dir)} if working_dir else {},
        entrypoint_type=EntrypointType.MODULE_PATH,
        **schedules,
    )
    kept = [schedule.model_dump(include=SCHEDULE_FIELDS) for schedule in present.schedules] if present else []
    made.apply(schedules=kept or None)
    return True


def _watch_for_zombies(client: Any) -> bool:
    """Have the server call a flow run Crashed that says nothing any more; False if it does so already."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ended = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended")
    wanted = AutomationCore(
        name=ZOMBIES,
        description=f"A flow run that has been silent for {SILENT_S} s is called Crashed.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in ended)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"Its process has been silent for {SILENT_S} s. To go on, start the deployment resume.",
            )
        ],
    )
    if client.read_automations_by_name(ZOMBIES):
        return False
    client.create_automation(wanted)
    return True


@cache
def _config(recipe: str, *overrides: str) -> dict[str, Any]:
    """A recipe as the form shows it, every setting filled in; one object for equal ones, which YAML can refer to."""
    return load_config(recipe, overrides).model_dump(mode="json")


def _fingerprint(deployment: Deployment, flow: Any, working_dir: Path | None) -> str:
    """The version of a deployment: of this package, and of what it says."""
    from prefect.utilities.callables import parameter_schema

    said = json.dumps(
        [asdict(deployment), parameter_schema(flow).model_dump(mode="json"), str(working_dir)], sort_keys=True
    )
    return f"{version('sao-pipeline')}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def prefect_yaml() -> str:
    """The list as `prefect deploy` reads it."""
    described = []
    for deployment in deployments():
        module, _, function = deployment.entrypoint.partition(":")
        schedule: dict[str, Any] = {}
        if deployment.cron:
            schedule = {"cron": deployment.cron, "timezone": "UTC", "active": deployment.active}
        elif deployment.interval_s:
            schedule = {"interval": deployment.interval_s, "active": deployment.active}
        described.append(
            {
                "name": deployment.name,
                "entrypoint": f"{module.replace('.', '/')}.py:{function}",
                "description": deployment.description,
                "tags": list(deployment.tags),
                "parameters": dict(deployment.parameters),
                "work_pool": {"name": WORK_POOL, "work_queue_name": deployment.queue},
                "schedules": [schedule] if schedule else [],
            }
        )
    head = (
        "# Written by `python -m flows.deployments > prefect.yaml`; `sao up` and `sao bootstrap` register the same.\n"
    )
    whole = {"name": "sao-pipeline", "prefect-version": version("prefect"), "deployments": described}
    return head + yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=110)


if __name__ == "__main__":
    sys.stdout.write(prefect_yaml())
