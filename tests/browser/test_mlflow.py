"""Two runs side by side in MLflow's UI, with their charts, traces, models and pages."""

from __future__ import annotations

import re

from pictures import Pictures
from playwright.sync_api import Page, expect
from runs import Started


def open_runs(page: Page, mlflow: str) -> None:
    """Click the way to the runs of the recipe `tiny`."""
    page.goto(mlflow)
    page.get_by_role("button", name="Model training").click()
    page.get_by_role("link", name="Experiments").first.click()
    page.get_by_role("link", name="tiny", exact=True).first.click()
    page.get_by_role("grid").wait_for()
    assistant = page.get_by_role("button", name="Close", exact=True)
    if assistant.count():
        assistant.first.click()


def test_two_selected_runs_are_compared(finished: Started, second: Started, page: Page, pictures: Pictures):
    open_runs(page, finished.mlflow)
    for run in (finished, second):
        page.get_by_role("link", name=run.run_id, exact=True).wait_for()
    boxes = page.get_by_role("checkbox", name="Press Space to toggle row selection")
    for row in range(2):
        boxes.nth(row).click()
    pictures.take(page, "mlflow-runs")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("heading", name="Comparing 2 Runs from 1 Experiment").wait_for()
    details = page.locator("main")
    for run in (finished, second):
        expect(details).to_contain_text(run.run_id)
    page.get_by_role("row", name=re.compile("^algorithm.name (grpo sao|sao grpo)$")).wait_for()
    pictures.take(page, "mlflow-compare")


def test_charts_of_the_runs_of_a_recipe_lie_over_each_other(
    finished: Started, second: Started, page: Page, pictures: Pictures
):
    open_runs(page, finished.mlflow)
    page.get_by_role("radiogroup").get_by_role("radio").nth(1).evaluate("chart_view => chart_view.click()")
    page.get_by_placeholder("Search metric charts").fill("reward/mean")
    page.get_by_role("heading", name="reward/mean", exact=True).wait_for()
    for run in (finished, second):
        expect(page.locator("main")).to_contain_text(f"{run.run_id} (reward/mean)")
    pictures.take(page, "mlflow-charts")


def test_a_run_shows_its_metrics_its_chart_and_its_rollouts(finished: Started, page: Page, pictures: Pictures):
    open_run(page, finished)
    page.get_by_role("tab", name="Model metrics").click()
    page.get_by_role("heading", name="reward_mean").first.wait_for()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("charts", exact=True).click()
    page.get_by_text("training.html", exact=True).click()
    page.frame_locator("main iframe").get_by_text("reward").first.wait_for()
    pictures.take(page, "mlflow-chart")


def test_sampled_rollouts_are_traces_with_their_reward(finished: Started, page: Page, pictures: Pictures):
    open_run(page, finished)
    page.get_by_role("tab", name="Traces").click()
    page.get_by_role("columnheader", name="reward").first.wait_for()
    page.get_by_role("row").filter(has_text="tr-").first.locator("a").first.click()
    trace = page.get_by_role("dialog")
    for part in ("rollout", "turn 1", "reward"):
        expect(trace).to_contain_text(part)
    pictures.take(page, "mlflow-trace")


def test_checkpoints_are_models(finished: Started, page: Page):
    open_runs(page, finished.mlflow)
    page.get_by_role("link", name="Models", exact=True).click()
    checkpoint = finished.up.home.ledger().latest_checkpoint(finished.run_id)
    assert checkpoint is not None
    page.get_by_role("link", name=f"step-{checkpoint.step}", exact=True).first.wait_for()


def open_run(page: Page, run: Started) -> None:
    mlflow_run = run.up.home.ledger().run(run.run_id).mlflow_run_id
    page.goto(f"{run.mlflow}/#/runs/{mlflow_run}")
    page.get_by_role("heading", name=run.run_id).wait_for()
