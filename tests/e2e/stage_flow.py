"""Runs one stage as a flow of its own, as a deployment would: `stage_flow.py module:flow run_id config.json`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from infra.services import prefect_environment, prefect_server
from infra.settings import Settings
from sao_core.config import TrainConfig

if __name__ == "__main__":
    place, run_id, path = sys.argv[1:]
    settings = Settings.from_environment()
    with prefect_server(settings) as server:
        os.environ.update(prefect_environment(settings, server))
        module, _, name = place.partition(":")
        flow = getattr(importlib.import_module(module), name)
        state = flow(TrainConfig.model_validate_json(Path(path).read_text()), run_id, return_state=True)
    print(state.type.value)
