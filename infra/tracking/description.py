"""What a run is, in MLflow's terms: params, tags, the version of the code, and its environment as a dataset."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from infra import pages
from infra.ledger import RunRecord
from infra.settings import Settings
from infra.tracking.client import VALUE_LENGTH, batches, key_name, set_tags
from sao_core.config import ConfigError, TrainConfig
from sao_core.environments import base as environments
from sao_core.outside import NotLent, Outside

logger = logging.getLogger("infra.tracking")

PACKAGE = "sao-pipeline"
_PARAMS_PER_BATCH = 90
_DIGEST_LENGTH = 16
"""MLflow takes 36 at most."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts; what MLflow refuses in a name becomes ``_``."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = prefix + key_name(key)
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = (value if isinstance(value, str) else json.dumps(value))[:VALUE_LENGTH]
    return flat


def spans(steps: Sequence[int]) -> str:
    """Ascending steps for people: ``3-5, 9``."""
    parts: list[tuple[int, int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], step)
        else:
            parts.append((step, step))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def describe(
    client: Any,
    found: Any,
    run: RunRecord,
    config: TrainConfig,
    settings: Settings,
    *,
    superseded: Sequence[int],
    parent: str | None,
) -> None:
    """Write params and tags of an MLflow run, and below which run it stands.

    A param never changes in MLflow: what a resume changed is told in a tag.
    """
    from mlflow.entities import Param

    params = flatten(config.model_dump(mode="json"))
    known = found.data.params
    missing = [Param(key, value) for key, value in params.items() if key not in known]
    for some in batches(missing, _PARAMS_PER_BATCH):
        client.log_batch(found.info.run_id, params=some, synchronous=True)
    changed = {key: value for key, value in params.items() if known.get(key, value) != value}
    tags = {
        "algorithm": run.algorithm,
        "recipe": run.recipe,
        "environment": config.environment.name,
        "model": config.model.path,
        "seed": str(config.seed),
        "objects": f"{settings.object_store}/runs/{run.run_id}",
        "mlflow.note.content": _note(run, config, settings),
        "prefect_flow_run_id": run.prefect_flow_run_id,
        "prefect_flow_run_url": pages.flow_run(pages.configured_prefect(settings), run),
        "superseded_steps": spans(superseded),
        "changed_params": json.dumps(changed) if changed else None,
        "mlflow.parentRunId": parent,
    }
    if "sao.version" not in found.data.tags:  # `sync` may run elsewhere, with other code
        tags |= code_version()
    set_tags(client, found.info.run_id, {key: value for key, value in tags.items() if value})


def _note(run: RunRecord, config: TrainConfig, settings: Settings) -> str:
    """The description of a run on its page."""
    page = pages.flow_run(pages.configured_prefect(settings), run)
    where = f" · [flow run in Prefect]({page})" if page else ""
    if config.evaluation.alone:
        return (
            f"evaluation of `{config.model.path}` on {config.suite}, seed {config.seed}{where}\n\n"
            f"`sao show {run.run_id}` · `sao compare {run.run_id} ANOTHER`"
        )
    return (
        f"{run.algorithm} on {config.environment.name}, from `{config.model.path}`, seed {config.seed}{where}\n\n"
        f"`sao show {run.run_id}` · `sao verify {run.run_id}` · `sao promote {run.run_id}`"
    )


def code_version() -> dict[str, str | None]:
    """Tags: this package's version, the commit of the working directory, and whether something is changed there."""
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    try:
        package = version(PACKAGE)
    except PackageNotFoundError:  # run from a source tree that was not installed
        package = "unknown"
    return {
        "sao.version": package,
        "mlflow.source.name": "sao",  # without a source the page of a run hides its commit
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": commit,
        "git.dirty": None if commit is None else str(bool(changes)).lower(),
    }


def datasets(config: TrainConfig) -> tuple[Any, Any]:
    """The environment's training tasks and its held-out tasks, as MLflow's inputs of a run."""
    known = {
        "environment": config.environment.name,
        "version": _environment_version(config),
        "options": config.environment.options,
        "seed": config.seed,
    }
    held_out = {**known, "held_out_prompts": config.evaluation.prompts}
    return (
        _dataset(config.environment.name, "training", known),
        _dataset(f"{config.environment.name} held out", "evaluation", held_out),
    )


def _dataset(name: str, context: str, known: Mapping[str, Any]) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    profile = json.dumps(known, sort_keys=True)
    digest = hashlib.sha256(profile.encode()).hexdigest()[:_DIGEST_LENGTH]
    source = json.dumps({"environment": known["environment"], "options": known["options"]})
    dataset = Dataset(name, digest, "environment", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _environment_version(config: TrainConfig) -> str | None:
    """The version of the environment's rules; None where its code is not at hand, or needs what only workers have.

    A mixture has none: each rollout carries the version of its part.
    """
    name = config.environment.name
    try:
        spec = environments.get(name)
        if spec.choose is not None:
            return None
        episode = spec.make(spec.parse_options(config.environment.options), Outside())
        asyncio.run(episode.close())
    except (ConfigError, NotLent):  # no such environment here, none with such options, or one that needs a sandbox
        return None
    except Exception as error:  # somebody else's code, perhaps on a machine that lacks what it needs
        logger.warning("the version of environment %s is not known here: %s", name, error)
        return None
    return episode.version


def _git(*arguments: str) -> str | None:
    """What git says of the working directory; None if it is no repository."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None
