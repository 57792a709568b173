"""Recurring training: go on from the newest promoted model, and promote the result if it is no worse."""

from __future__ import annotations

import logging

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.train import train
from infra.ledger import Ledger
from infra.settings import Settings
from infra.tracking.registry import resolve_model
from sao_core.config import ConfigError, TrainConfig
from tasks.promote import promote_run

logger = logging.getLogger(__name__)


@flow(name="adapt")
def adapt(config: TrainConfig, promote: bool = True, run_id: str | None = None) -> State:
    """Train the newest promoted model of a recipe further.

    Args:
        config: The training; `model.path` becomes the promoted model of this recipe, once there is one.
        promote: Make the result the promoted model, if its evaluation is no worse than that of the last one.
        run_id: A name for the run; leave it empty for one by recipe and time.
    """
    settings = Settings.from_environment()
    ledger = Ledger(settings.database_url)
    state: State = train.fn(from_champion(config, settings), run_id)
    trained = ledger.run_of_flow_run(flow_run.id)
    if not (promote and trained and state.is_completed()):
        return state
    return Completed(message=f"{state.message}; {promote_run(trained)}")


def from_champion(config: TrainConfig, settings: Settings) -> TrainConfig:
    """The training as it starts from the promoted model of its recipe; as it is while there is none."""
    champion = f"models:/{config.recipe}@champion"
    try:
        resolve_model(champion, settings)
    except ConfigError as error:
        logger.info("this run starts from %s: %s", config.model.path, error)
        return config
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": champion}),
            "warm_start": config.warm_start.model_copy(update={"enabled": False}),
        }
    )
