"""Text that attacks (prompts, observations, labels of difficulty) is text wherever a run is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import FLAG
from playwright.sync_api import expect
from runs import Started
from watched import Watched

from infra.viewer import trajectory_page, trajectory_view


@pytest.mark.parametrize("key", ["training-report", "evaluation"])
def test_in_the_artifacts_of_a_run(hostile: Started, watched: Watched, key: str):
    watched.page.goto(hostile.artifact_page(key))
    expect(watched.page.locator("main")).to_contain_text("onerror=")
    assert watched.page.locator("main img").count() == 0
    watched.nothing_was_executed()


def test_on_the_page_of_a_run(hostile: Started, watched: Watched):
    watched.page.goto(f"{hostile.page}?tab=Artifacts")
    watched.page.get_by_text("training-report", exact=True).wait_for()
    for tab in ("Logs", "Task Runs", "Parameters"):
        watched.page.get_by_role("tab", name=tab).click()
    watched.nothing_was_executed()


def test_in_mlflow(hostile: Started, watched: Watched):
    mlflow_run = hostile.up.home.ledger().run(hostile.run_id).mlflow_run_id
    watched.page.goto(f"{hostile.mlflow}/#/runs/{mlflow_run}")
    watched.page.get_by_role("heading", name=hostile.run_id).wait_for()
    watched.page.get_by_role("tab", name="Traces").click()
    expect(watched.page.locator("main")).to_contain_text("onerror")
    watched.nothing_was_executed()


def test_in_the_viewer(hostile: Started, watched: Watched, tmp_path: Path):
    home = hostile.up.home
    ledger = home.ledger()
    for row in ledger.evaluation_rows(hostile.run_id, 0):
        file = tmp_path / f"{row.trajectory_id}.html"
        file.write_text(trajectory_page(trajectory_view(ledger, home.settings, row.trajectory_id)), encoding="utf-8")
        watched.page.goto(file.as_uri())
        expect(watched.page.locator("main")).to_contain_text(FLAG)
        watched.page.locator("section.policy [data-i]").first.click()
        watched.nothing_was_executed()
    assert [url for url in watched.requests if not url.startswith("file:")] == []
