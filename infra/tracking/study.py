"""A study in MLflow: the run that the training runs of a study stand below."""

from __future__ import annotations

from typing import Any

from infra.tracking.client import find_run

STUDY_TAG = "sao.study"


def study_run(client: Any, experiment_id: str, study: str) -> str:
    """Find or make the run of a study in an experiment; of two that were made at once the first stands."""
    found = find_run(client, experiment_id, STUDY_TAG, study)
    if found is not None:
        return str(found.info.run_id)
    note = f"The training runs of the study `{study}` (`tracking.study`)."
    made = client.create_run(experiment_id, tags={STUDY_TAG: study, "mlflow.note.content": note}, run_name=study)
    client.set_terminated(made.info.run_id, "FINISHED")
    first = find_run(client, experiment_id, STUDY_TAG, study)
    if first is not None and first.info.run_id != made.info.run_id:
        client.delete_run(made.info.run_id)
        return str(first.info.run_id)
    return str(made.info.run_id)
