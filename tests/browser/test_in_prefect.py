"""A run that was started from its form, on its page in the Prefect UI and in MLflow."""

from __future__ import annotations

import re

from pictures import Pictures
from playwright.sync_api import Page, expect
from runs import QUICK, Started

RUN_MS = 400_000


def test_a_run_started_from_the_form_shows_its_progress_and_completes(started: Started, page: Page, pictures: Pictures):
    page.goto(f"{started.page}?tab=Artifacts")
    page.get_by_text(re.compile(r"update \d+ of \d+")).first.wait_for()
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible(timeout=RUN_MS)
    page.reload()
    for key in ("progress", "evaluation", "mlflow-run", "trajectories", "training-report"):
        page.get_by_text(key, exact=True).first.wait_for()
    expect(page.get_by_text(started.run_id).first).to_be_visible()
    pictures.take(page, "run")
    page.get_by_role("tab", name="Task Runs").click()
    for task in ("prepare policy", "rollout worker 0", "evaluator", "update 3", "report"):
        page.get_by_placeholder("Search by run name").fill(task)
        page.locator("main").get_by_role("link", name=task, exact=True).first.wait_for()


def test_what_was_typed_is_what_was_trained(finished: Started, settings: dict[str, str]):
    config = finished.up.home.ledger().run(finished.run_id).config
    learner = config["learner"]
    assert learner["updates"] == int(settings["learner.updates"])
    assert learner["record_tokens"] == "all"
    if settings is QUICK:
        assert config["tracking"]["traces"] == 1
        assert config["warm_start"]["enabled"] is False
        assert config["environment"]["options"] == {"tool_latency_mean_s": 0.05}
        assert learner["batch_size"] == 8


def test_the_report_tells_of_the_best_and_the_worst_rollout(finished: Started, page: Page, pictures: Pictures):
    page.goto(finished.artifact_page("training-report"))
    for heading in (finished.run_id, "A typical rollout", "The best", "The worst"):
        page.get_by_role("heading", name=heading).first.wait_for()
    expect(page.locator("main")).to_contain_text("user: ")
    expect(page.locator("main")).to_contain_text("assistant: ")
    pictures.take(page, "report", full_page=True, clip={"x": 256, "y": 0, "width": 620, "height": 1250})


def test_a_link_leads_from_the_run_to_mlflow(finished: Started, page: Page, pictures: Pictures):
    page.goto(finished.artifact_page("mlflow-run"))
    link = page.get_by_role("link", name=f"{finished.mlflow}/#/")
    page.goto(link.get_attribute("href") or "")
    page.get_by_role("heading", name=finished.run_id).wait_for()
    expect(page.locator("main")).to_contain_text("reward/mean")
    expect(page.locator("main")).to_contain_text("policy.lr")
