"""The form of a deployment in the Prefect UI: what it shows, what it refuses, and what it sends."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from installation import Installation
from pictures import Pictures
from playwright.sync_api import Page, Route
from prefect_form import Form
from pydantic import BaseModel
from runs import Started

from flows.recipes import load_config
from sao_core.config import TrainConfig


def test_a_run_is_started_from_its_form(started: Started):
    assert started.up.flow_run(started.flow_run)["deployment_id"]  # it goes on while the form is looked at below


def test_deployments_are_listed_with_their_tags_and_schedules(up: Installation, page: Page, pictures: Pictures):
    page.goto(f"{up.prefect}/v2/deployments")
    for name in ("tiny", "resume", "nightly", "rollout-workers", "evaluate", "study", "upkeep"):
        page.get_by_role("link", name=name, exact=True).first.wait_for()
    pictures.take(page, "deployments")
    page.get_by_role("link", name="tiny", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").wait_for()
    pictures.take(page, "run-menu", clip={"x": 256, "y": 0, "width": 1024, "height": 400})


def test_the_form_has_every_setting_in_declared_order_by_its_name(up: Installation, page: Page, pictures: Pictures):
    form = Form.open(page, up.prefect, "tiny")
    pictures.take(page, "form")
    assert form.label_order() == names(TrainConfig)
    text = form.field("").inner_text()
    for section in (TrainConfig, *sections(TrainConfig)):
        for field in section.model_fields.values():
            assert (field.description or "?") in text


def test_the_form_begins_with_the_recipe_and_offers_choices(up: Installation, page: Page):
    form = Form.open(page, up.prefect, "tiny")
    recipe = load_config("tiny")
    assert form.value("recipe") == "tiny"
    assert float(form.value("policy.lr")) == recipe.policy.lr
    assert int(form.value("learner.updates")) == recipe.learner.updates
    assert form.field("warm_start.enabled").get_by_role("switch").is_checked()
    assert form.choices("model.dtype") == ["float32", "bfloat16"]
    assert form.choices("algorithm.name")[:2] == ["sao", "sao-single-update"]


def test_a_form_that_nobody_changed_sends_the_recipe(up: Installation, page: Page):
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()

    def put_off(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        body["state"]["state_details"]["scheduled_time"] = later
        route.continue_(post_data=json.dumps(body))

    form = Form.open(page, up.prefect, "tiny")
    page.route("**/create_flow_run", put_off)
    with page.expect_response("**/create_flow_run") as answer:
        form.submit()
    assert answer.value.status == 201
    flow_run = answer.value.json()["id"]
    kept = up.flow_run(flow_run)["parameters"]
    up.call("DELETE", f"/flow_runs/{flow_run}")
    assert kept == {"config": load_config("tiny").model_dump(mode="json"), "run_id": None}


def test_a_value_out_of_range_is_refused_with_its_name(up: Installation, page: Page, pictures: Pictures):
    form = Form.open(page, up.prefect, "tiny")
    form.set("learner.updates", "0")
    form.submit()
    refused = form.field("learner.updates").get_by_role("spinbutton")
    assert refused.evaluate("field => field === document.activeElement")
    assert "greater than or equal to 1" in refused.evaluate("field => field.validationMessage")

    form.set("learner.updates", "10")
    form.set("policy.lr", "0")
    with page.expect_response("**/create_flow_run") as answer:
        form.submit()
    assert answer.value.status == 409
    page.get_by_text("Validation failed for field 'config.policy.lr'").wait_for()
    pictures.take(page, "refused", clip={"x": 256, "y": 500, "width": 1024, "height": 300})


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The sections of a configuration, each before its own."""
    found: list[type[BaseModel]] = []
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += [field.annotation, *sections(field.annotation)]
    return found


def names(model: type[BaseModel]) -> list[str]:
    """Names of settings and sections as a form shows them: a section, then what is in it."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        found.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += names(field.annotation)
    return found
