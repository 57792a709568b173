"""The task of one update, as a long flow run sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prefect import flow
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.update import update


class Run(SimpleNamespace):
    """A run of three steps, whose tasks are over then."""

    issuer = SimpleNamespace(fill=lambda: None)

    def command(self, verb: str, *, step: int, **_: Any) -> bool | None:
        return step <= 3 if verb == "update_value" else None


def test_a_flow_run_remembers_nothing_of_its_updates(prefect_api: str) -> None:
    @flow
    def loop() -> tuple[list[bool], int]:
        made = [update(Run(), step) for step in range(1, 5)]
        context = FlowRunContext.get()
        assert context is not None
        return made, len(context.run_results)

    with temporary_settings({PREFECT_API_URL: prefect_api}):
        made, remembered = loop()
    assert made == [True, True, True, False]
    assert remembered == 0
