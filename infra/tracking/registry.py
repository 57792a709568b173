"""The registry of models in MLflow: one registered model per recipe, whose versions are policies in our own store.

A version names its policy by run, version and sha256; the files stay where the learner put them, and the checkpoint
gets a name in the ledger, so that retention and upkeep keep them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from infra.ledger import CheckpointRecord, Ledger, LedgerError, PolicyRecord, RunRecord
from infra.objects import ObjectStore
from infra.policy_store import PolicyGone, PolicyStore
from infra.refusals import without_password
from infra.settings import Settings
from infra.tracking.client import RUN_TAG, TrackingError, explain, is_absent, is_direct, open_client
from sao_core.config import ConfigError

CHAMPION = "champion"
"""The alias of the version that was promoted last."""

STEP_TAG, VERSION_TAG, SHA_TAG, URI_TAG = "sao.step", "sao.policy_version", "sao.policy_sha256", "sao.uri"
SCHEME = "models:/"
_MODEL_VERSIONS_TAG = "mlflow.modelVersions"


@dataclass(frozen=True)
class Registered:
    """A version of a registered model."""

    name: str
    number: int
    run_id: str
    step: int
    policy_version: int
    policy_sha256: str

    def __str__(self) -> str:
        return f"{self.name} version {self.number} (step {self.step} of {self.run_id})"


def model_name(recipe: str) -> str:
    """The registered model of a recipe: its name without what a model URI could not hold."""
    return re.sub(r"[^\w.-]", "_", recipe)


def policy_uri(settings: Settings, policy: PolicyRecord) -> str:
    """Where a policy's files are, for other programs."""
    place = f"{settings.object_store}/{policy.object_key}"
    return place if "://" in place else f"file://{place}"


def checkpoint_policy(ledger: Ledger, run_id: str, step: int) -> PolicyRecord:
    """The policy that a surviving checkpoint resumes from.

    Raises:
        LedgerError: there is none.
    """
    found = [policy for policy in ledger.policies(run_id) if policy.step <= step and not policy.superseded]
    if not found:
        raise LedgerError(f"run {run_id} has no policy at step {step}")
    return found[-1]


def register(
    client: Any,
    ledger: Ledger,
    settings: Settings,
    run: RunRecord,
    checkpoint: CheckpointRecord,
    tags: Mapping[str, str] | None = None,
) -> Registered:
    """Make the policy of a checkpoint a version of the recipe's model, once; the checkpoint is kept from then on.

    Raises:
        LedgerError: the checkpoint is gone.
    """
    name, policy = model_name(run.recipe), checkpoint_policy(ledger, run.run_id, checkpoint.step)
    if checkpoint.name is None:
        ledger.name_checkpoint(run.run_id, checkpoint.step, f"registered-{checkpoint.step}")
    for version in versions(client, name):
        if (version.run_id, version.step, version.policy_sha256) == (run.run_id, checkpoint.step, policy.sha256):
            return version
    _ensure_model(client, name, run.recipe)
    model_id = _logged_model(client, run, checkpoint.step, policy.sha256)
    uri = policy_uri(settings, policy)
    known = {
        RUN_TAG: run.run_id,
        STEP_TAG: str(checkpoint.step),
        VERSION_TAG: str(policy.version),
        SHA_TAG: policy.sha256,
        URI_TAG: uri,
        **(tags or {}),
    }
    # A server takes no folder of its machine for a source; the logged model says where the files are.
    by_model = not is_direct(settings.tracking_uri) and not uri.startswith("s3://")
    if by_model and model_id is None:
        raise TrackingError(f"the checkpoint of step {checkpoint.step} is not in MLflow yet: sao sync {run.run_id}")
    made = client.create_model_version(
        name,
        f"{SCHEME}{model_id}" if by_model else uri,
        run.mlflow_run_id,
        tags=known,
        description=f"The policy of step {checkpoint.step} of {run.run_id}, in {uri}. "
        f"As a Hugging Face folder: sao export {run.run_id} FOLDER --checkpoint {checkpoint.step}",
        await_creation_for=0,
        model_id=model_id,
    )
    if model_id is not None and is_direct(settings.tracking_uri):  # a server does this by itself
        link = f'[{{"name": "{name}", "version": {made.version}}}]'
        client.set_logged_model_tags(model_id, {_MODEL_VERSIONS_TAG: link})
    return Registered(name, int(made.version), run.run_id, checkpoint.step, policy.version, policy.sha256)


def versions(client: Any, name: str) -> list[Registered]:
    """The versions of a registered model that this program made, newest first; none if there is no such model."""
    found: list[Registered] = []
    token = None
    while True:
        page = client.search_model_versions(
            f"name = '{name}'", max_results=200, order_by=["version_number DESC"], page_token=token
        )
        found += [_registered(version) for version in page if RUN_TAG in version.tags]
        token = page.token
        if not token:
            return found


def version_at(client: Any, name: str, reference: str) -> Registered | None:
    """The version that an alias, or a number, stands for; None if there is none.

    Raises:
        TrackingError: another program made it.
    """
    try:
        if reference.startswith("@"):
            version = client.get_model_version_by_alias(name, reference[1:])
        else:
            version = client.get_model_version(name, reference)
    except Exception as error:
        if is_absent(error):
            return None
        raise
    if RUN_TAG not in version.tags:
        raise TrackingError(f"{name} version {version.version} was not registered by sao: it has no tag {RUN_TAG}")
    return _registered(version)


def model_version(client: Any, path: str) -> Registered | None:
    """The version that ``models:/NAME@ALIAS`` or ``models:/NAME/NUMBER`` stands for; None if there is none.

    Raises:
        ConfigError: it is written otherwise.
        TrackingError: another program made it.
    """
    parts = re.fullmatch(r"models:/([^/@]+)(?:(@[^/@]+)|/([0-9]+))", path)
    if parts is None:
        raise ConfigError(f"model.path must be models:/NAME@{CHAMPION} or models:/NAME/VERSION: got {path}")
    name, alias, number = parts.groups()
    return version_at(client, name, alias or number)


def resolve_model(path: str, settings: Settings, ledger: Ledger | None = None) -> str:
    """The folder of a model: ``models:/NAME@champion`` and ``models:/NAME/3`` are fetched, others stay as they are.

    ``ledger`` is opened if it is needed and none is given.

    Raises:
        ConfigError: there is no such model, or its files are gone; the message says the way out.
        TrackingError: MLflow does not answer.
        CorruptFolder: the files are not those that were registered.
    """
    if not path.startswith(SCHEME):
        return path
    where = without_password(settings.tracking_uri)
    try:
        version = model_version(open_client(settings.tracking_uri), path)
    except ConfigError:
        raise
    except TrackingError as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    except Exception as error:  # of MLflow, SQLAlchemy or requests: each means that it cannot be asked
        raise TrackingError(f"MLflow at {where}: {explain(error, settings.tracking_uri)}") from error
    if version is None:
        raise ConfigError(
            f"model.path={path}: MLflow at {where} has no such model; promote a run first: sao promote RUN"
            if "@" in path
            else f"model.path={path}: MLflow at {where} has no such version; `sao promote RUN` registers a run's policy"
        )
    if ledger is not None:
        return _fetch(path, version, ledger, settings)
    with closing(Ledger(settings.database_url)) as own:
        return _fetch(path, version, own, settings)


def _fetch(path: str, version: Registered, ledger: Ledger, settings: Settings) -> str:
    try:
        policy = ledger.policy(version.run_id, version.policy_version)
        if policy.sha256 != version.policy_sha256:
            raise ConfigError(
                f"model.path={path}: policy {policy.version} of run {version.run_id} is not the one that was "
                "registered: this ledger and this MLflow do not belong together"
            )
        store = PolicyStore(ObjectStore.from_settings(settings), ledger, settings.cache)
        return str(store.fetch(version.run_id, version.policy_version))
    except (LedgerError, PolicyGone) as error:
        raise ConfigError(f"model.path={path}: the files of {version} cannot be had here: {error}") from error


def _registered(version: Any) -> Registered:
    tags = version.tags
    return Registered(
        name=version.name,
        number=int(version.version),
        run_id=tags[RUN_TAG],
        step=int(tags[STEP_TAG]),
        policy_version=int(tags[VERSION_TAG]),
        policy_sha256=tags[SHA_TAG],
    )


def _ensure_model(client: Any, name: str, recipe: str) -> None:
    try:
        client.create_registered_model(name, description=f"Policies that the recipe `{recipe}` trained.")
    except Exception as error:
        if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
            raise


def _logged_model(client: Any, run: RunRecord, step: int, sha256: str) -> str | None:
    """The id of the logged model of a checkpoint."""
    if run.mlflow_run_id is None:
        return None
    experiment = client.get_run(run.mlflow_run_id).info.experiment_id
    found = client.search_logged_models([experiment], f"source_run_id = '{run.mlflow_run_id}'")
    for model in found:
        if (model.tags.get(STEP_TAG), model.tags.get(SHA_TAG)) == (str(step), sha256):
            return str(model.model_id)
    return None
