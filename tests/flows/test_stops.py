"""What ends a flow's body: a stop is a stop, also where Prefect raises something else on its way."""

from __future__ import annotations

import pytest
from prefect.exceptions import TerminationSignal

from flows.supervision import stop_behind
from infra.training_run import StopRequested

STOPS = [KeyboardInterrupt(), SystemExit(0), StopRequested("Stopped"), TerminationSignal(signal=15)]


def masked(stop: BaseException, by: Exception) -> Exception:
    """What the body sees if ``by`` is raised while ``stop`` is handled, as Prefect's task engine does."""
    try:
        try:
            raise stop
        finally:
            raise by
    except Exception as seen:
        return seen


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
def test_a_stop_is_found_behind_what_was_raised_on_its_way(stop: BaseException) -> None:
    assert stop_behind(stop) is stop
    assert stop_behind(masked(stop, ValueError("Task run is not set"))) is stop


def test_a_failure_is_no_stop() -> None:
    assert stop_behind(masked(OSError("disk"), RuntimeError("could not write"))) is None
    assert stop_behind(ValueError("Task run is not set")) is None
