"""What can be checked of a run before anything of it is made."""

from __future__ import annotations

from infra.settings import Settings
from infra.tracking.registry import resolve_model
from sao_core.config import TrainConfig
from sao_core.environments import base as environments
from sao_core.models.folder import check_model_folder


def preflight(config: TrainConfig, settings: Settings, *, resuming: bool = False) -> str:
    """Check model, environment and tasks; returns the folder of the model to start from (`tiny` stays `tiny`).

    A run that is resumed has its weights in a checkpoint and may have outlived the folder that it began with.

    Raises:
        ConfigError: something cannot work; one line that names it and the way out.
    """
    environment = environments.get(config.environment.name)
    options = environment.parse_options(config.environment.options)
    environment.tasks(options, config.seed).evaluation_keys(1)
    if resuming:
        return config.model.path
    folder = resolve_model(config.model.path, settings)
    check_model_folder(folder)
    return folder
