"""Runs a flow run again under its own id, as the UI's Retry does: `retry_flow.py flow_run_id`; prints its end state."""

from __future__ import annotations

import os
import sys
from uuid import UUID

from infra.services import prefect_environment
from infra.settings import Settings

if __name__ == "__main__":
    os.environ.update(prefect_environment(Settings.from_environment(), None))
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow
    from prefect.states import AwaitingRetry

    from flows.train import train

    flow_run_id = UUID(sys.argv[1])
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, AwaitingRetry(), force=True)
        flow_run = client.read_flow_run(flow_run_id)
    state = run_flow(train, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")
    print(state.type.value, flush=True)
    os._exit(0)
