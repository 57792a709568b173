"""What can be checked of a run before anything of it is made."""

from __future__ import annotations

from infra.prompts import check_end
from infra.settings import ChatKeys, Settings
from infra.targets import resolve_target
from sao_core.config import ConfigError, TrainConfig
from sao_core.environments import base as environments
from sao_core.models.folder import check_model_folder


def preflight(config: TrainConfig, settings: Settings, *, resuming: bool = False, training: bool = True) -> str:
    """Check model, environment and tasks; returns the folder of the model to start from (`tiny` stays `tiny`).

    A run that is resumed has its weights in a checkpoint and may have outlived the folder that it began with.

    Raises:
        ConfigError: something cannot work; one line that names it and the way out.
        SettingsError: a variable that the processes of the run would read is wrong.
    """
    ChatKeys.from_environment()
    if training and config.evaluation.alone:
        raise ConfigError(
            "evaluation.alone=true makes a run that trains nothing: start it with `sao evaluate`, or go on with it by "
            "`sao evaluate --resume RUN`"
        )
    environment = environments.get(config.environment.name)
    options = environment.parse_options(config.environment.options)
    tasks = environment.tasks(options, config.seed)
    tasks.evaluation_keys(1)
    check_end(config, tasks)
    if resuming:
        return config.model.path
    folder = resolve_target(config.model.path, settings)
    check_model_folder(folder)
    return folder
