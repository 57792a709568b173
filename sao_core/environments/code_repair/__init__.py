"""Code repair: a small repository with a failing test, tools to mend it, and hidden tests out of reach that judge."""

from __future__ import annotations

from typing import Any

from sao_core.environments.base import Environment, EnvironmentSpec, TaskSource
from sao_core.environments.code_repair.bundled import BundledTasks
from sao_core.environments.code_repair.demonstrations import demonstrations
from sao_core.environments.code_repair.environment import CodeRepair
from sao_core.environments.code_repair.options import CodeRepairOptions
from sao_core.environments.code_repair.own_tasks import OwnTasks
from sao_core.outside import Outside


def _make(options: Any, outside: Outside) -> Environment:
    return CodeRepair(options, outside.code)


def _tasks(options: Any, seed: int) -> TaskSource:
    if options.path is not None:
        return OwnTasks(options, options.path, seed)
    return BundledTasks(options.levels, options.train_tasks, seed)


SPEC = EnvironmentSpec(
    name="code_repair", options_model=CodeRepairOptions, make=_make, tasks=_tasks, demonstrations=demonstrations
)
