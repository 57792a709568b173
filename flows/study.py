"""A study: variants of one training, each over several seeds, compared in one table and side by side in MLflow."""

from __future__ import annotations

import logging

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from flows.recipes import override_config
from flows.train import train
from infra.ledger import Ledger, RunStatus
from infra.settings import Settings
from infra.studies import StudyRow, compare
from sao_core.config import ConfigError, TrainConfig

logger = logging.getLogger(__name__)


@flow(name="study")
def study(config: TrainConfig, name: str, variants: dict[str, list[str]], seeds: list[int]) -> State:
    """Train every variant with every seed, one after the other; a study that was interrupted goes on where it was.

    Args:
        config: What all runs have in common.
        name: The study; started again under the same name, it keeps the runs that are complete.
        variants: Name of a variant → the settings that make it, e.g. `algorithm.name=grpo`.
        seeds: Each variant is trained once with each.
    """
    ledger = Ledger(Settings.from_environment().database_url)
    planned = plan(config, name, variants, seeds)
    failed = []
    for run_id, settings in planned.items():
        if ledger.has_run(run_id) and ledger.run(run_id).status is RunStatus.COMPLETED:
            logger.info("%s is complete already", run_id)
            continue
        state = train(settings, run_id, return_state=True)
        if state.is_cancelled() or state.is_paused():
            return Cancelled(message=f"{run_id} was stopped. Start the study {name} again to go on")
        if not state.is_completed():
            failed.append(run_id)
    rows = compare(ledger, {variant: [f"{name}-{variant}-s{seed}" for seed in seeds] for variant in variants})
    show(name, rows)
    if failed:
        return Failed(message=f"{', '.join(failed)} failed; start the study {name} again to go on with what is missing")
    return Completed(message=f"{len(planned)} runs of {name} are complete")


def plan(config: TrainConfig, name: str, variants: dict[str, list[str]], seeds: list[int]) -> dict[str, TrainConfig]:
    """Run id → configuration, seed by seed, so that an early look has every variant.

    Raises:
        ConfigError: there is nothing to compare, or a variant sets what there is not.
    """
    if not variants or not seeds:
        raise ConfigError(f"a study needs one variant and one seed at least: got {len(variants)} and {len(seeds)}")
    values = config.model_dump(mode="json")
    return {
        f"{name}-{variant}-s{seed}": override_config(values, [*settings, f"seed={seed}", f"tracking.study={name}"])
        for seed in seeds
        for variant, settings in variants.items()
    }


def show(name: str, rows: list[StudyRow]) -> None:
    """The comparison, on the page of the flow run."""
    try:
        create_table_artifact(
            table=[row.as_dict() for row in rows], key="study", description=f"{name}: variants compared"
        )
    except Exception as error:  # the server may be gone: the runs are in ledger and MLflow all the same
        logger.warning("the comparison could not be shown in the Prefect UI: %s", error)
