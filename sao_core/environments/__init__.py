"""Tasks and episodes: the protocol, the registry, and one file per environment or adapter.

Importing this package imports no environment and no torch; :func:`get` imports the one it names.
"""

from sao_core.environments.base import (
    Environment,
    EnvironmentSpec,
    StepResult,
    Task,
    TaskSource,
    get,
    names,
)

__all__ = ["Environment", "EnvironmentSpec", "StepResult", "Task", "TaskSource", "get", "names"]
