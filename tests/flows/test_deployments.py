"""Deployments: one list for code and prefect.yaml, forms that fit their flows, and respect for what people changed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from flows import deployments
from flows.deployments import TRAINING, Deployment, deploy, prefect_yaml
from infra.services import WORK_POOL
from infra.settings import Settings
from sao_core.config import parse_config


def schema_of(deployment: Deployment) -> dict[str, Any]:
    module, _, function = deployment.entrypoint.partition(":")
    return parameter_schema(getattr(import_module(module), function)).model_dump(mode="json", exclude_unset=True)


def test_prefect_yaml_is_written_from_the_same_list():
    written = Path(__file__).parents[2] / "prefect.yaml"
    assert written.read_text() == prefect_yaml(), "run: python -m flows.deployments > prefect.yaml"


@pytest.mark.parametrize("deployment", deployments.deployments(), ids=lambda d: d.name)
def test_what_a_form_begins_with_is_valid(deployment: Deployment):
    schema = schema_of(deployment)
    errors = validate(dict(deployment.parameters), schema, raise_on_error=False, ignore_required=True)
    assert not errors, errors
    assert set(deployment.parameters) <= set(schema["properties"])
    missing = set(schema.get("required", ())) - set(deployment.parameters)
    assert missing <= {"run_id"}, "only what nobody can know beforehand is left to fill in"
    if "config" in deployment.parameters:
        parse_config(deployment.parameters["config"])


@pytest.mark.parametrize("deployment", deployments.deployments(), ids=lambda d: d.name)
def test_every_field_of_a_form_has_a_place_and_a_text(deployment: Deployment):
    schema = schema_of(deployment)
    for section in (schema, *schema.get("definitions", {}).values()):
        fields = section.get("properties", {})
        assert [field["position"] for field in fields.values()] == list(range(len(fields)))
        for name, field in fields.items():
            assert field.get("description") or "$ref" in field, name


def test_limits_and_choices_are_in_the_form():
    definitions = schema_of(deployments.deployments()[0])["definitions"]
    assert definitions["PolicyConfig"]["properties"]["lr"]["exclusiveMinimum"] == 0
    assert "grpo" in definitions["AlgorithmConfig"]["properties"]["name"]["enum"]


def test_only_one_training_of_a_recipe_and_a_paused_nightly_one():
    by_name = {d.name: d for d in deployments.deployments()}
    assert {by_name[name].queue for name in ("tiny", "resume", "nightly", "study")} == {TRAINING}
    assert by_name["nightly"].cron
    assert not by_name["nightly"].active
    assert by_name["upkeep"].active


def test_deploying_again_leaves_what_people_changed(prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = Settings.from_environment({"PREFECT_API_URL": prefect_api}, directory=tmp_path)
    said: list[str] = []
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        monkeypatch.setattr(deployments, "version", lambda _: "9.9.8")  # other tests share the server
        deploy(settings, said.append)
        assert {f"deployment {d.name}" for d in deployments.deployments()} <= set(said)
        nightly = client.read_deployment_by_name("adapt/nightly")
        assert nightly.work_pool_name == WORK_POOL
        assert client.read_work_queue_by_name(TRAINING, WORK_POOL).concurrency_limit == 1
        assert nightly.work_queue_name == TRAINING
        assert nightly.global_concurrency_limit is None, "its lease would kill a run that cannot renew it"
        assert nightly.enforce_parameter_schema
        (schedule,) = nightly.schedules
        assert not schedule.active
        client.update_deployment_schedule(nightly.id, schedule.id, active=True)
        client.update_deployment(nightly.id, DeploymentUpdate(description="ours now"))

        said.clear()
        deploy(settings, said.append)
        assert said == []
        assert client.read_deployment_by_name("adapt/nightly").description == "ours now"

        # A new version of the package brings its own text, and leaves the schedules.
        monkeypatch.setattr(deployments, "version", lambda _: "9.9.9")
        deploy(settings, said.append)
        assert "deployment nightly" in said
        upgraded = client.read_deployment_by_name("adapt/nightly")
        assert upgraded.description.startswith("Nightly training")
        assert [s.active for s in upgraded.schedules] == [True]
