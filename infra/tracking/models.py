"""Checkpoints as MLflow's logged models: what each scored, and where its policy lies in our own store.

The ledger says which checkpoints there are; MLflow is brought into line with it, however often. A model whose files
retention removed is deleted there; one of which only the optimizer's state is gone is marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.ledger import CheckpointRecord, EvaluationRecord, Ledger, PolicyRecord, RunRecord
from infra.settings import Settings
from infra.tracking.client import RUN_TAG, Destination, batches, is_absent, milliseconds, points
from infra.tracking.evaluations import find_child
from infra.tracking.registry import (
    SHA_TAG,
    STEP_TAG,
    URI_TAG,
    VERSION_TAG,
    checkpoint_policy,
    policy_uri,
    register,
)

CHECKPOINT_SHA_TAG = "sao.checkpoint_sha256"
STATE_TAG = "checkpoint"
WHOLE, POLICY_ONLY = "complete", "removed by retention; its policy is kept"
_POINTS_PER_BATCH = 90


class Models:
    """The logged models of one run."""

    def __init__(self, ledger: Ledger, settings: Settings, run_id: str) -> None:
        self._ledger = ledger
        self._settings = settings
        self._run_id = run_id
        self._known: dict[int, Any] | None = None
        """Step → the logged model, as far as MLflow was told of it."""
        self._scored: set[tuple[str, int]] = set()

    def send(self, there: Destination, children: Mapping[int, str], tasks: Any) -> None:
        """Bring MLflow into line with the ledger.

        ``children``: number of an evaluation that was just sent → its MLflow run; ``tasks``: what it was made on.
        """
        news = bool(children) or self._known is None
        if self._known is None:
            self._known = self._load(there)
        checkpoints = {record.step: record for record in self._ledger.checkpoints(self._run_id)}
        for step in sorted(self._known.keys() - checkpoints.keys()):
            self._retire(there, self._known[step], step)
        for step in sorted(checkpoints):
            news |= self._keep(there, checkpoints[step])
        if news:
            self._score_all(there, children, tasks)

    def register_newest(self, there: Destination, run: RunRecord) -> None:
        """Make the newest checkpoint of a finished run a version of its recipe's registered model."""
        newest = self._ledger.latest_checkpoint(self._run_id)
        if newest is not None:
            register(there.client, self._ledger, self._settings, run, newest)

    def model_id(self, policy_sha256: str) -> str | None:
        """The logged model of a policy, if there is one by now."""
        known = (self._known or {}).values()
        return next((str(model.model_id) for model in known if model.tags[SHA_TAG] == policy_sha256), None)

    def _load(self, there: Destination) -> dict[int, Any]:
        """The logged models of the run that this program made; of two of a step (a kill came between) one stays."""
        found: dict[int, Any] = {}
        token = None
        while True:
            query = f"source_run_id = '{there.run_id}'"
            page = there.client.search_logged_models([there.experiment_id], query, page_token=token)
            for model in page:
                if STEP_TAG not in model.tags:
                    continue
                if int(model.tags[STEP_TAG]) in found:
                    _delete(there, model)
                    continue
                found[int(model.tags[STEP_TAG])] = model
                self._scored |= {(str(model.model_id), metric.timestamp) for metric in model.metrics or ()}
            token = page.token
            if not token:
                return found

    def _keep(self, there: Destination, checkpoint: CheckpointRecord) -> bool:
        """Make the model of a checkpoint, unless it is there; True if it was made.

        One of the same step that was undone is replaced.
        """
        assert self._known is not None
        known = self._known.get(checkpoint.step)
        if known is not None and (known.tags[CHECKPOINT_SHA_TAG], known.tags[STATE_TAG]) != (checkpoint.sha256, WHOLE):
            _delete(there, known)
            known = None
        made = known is None
        if known is None:
            policy = checkpoint_policy(self._ledger, self._run_id, checkpoint.step)
            known = self._known[checkpoint.step] = self._create(there, checkpoint, policy)
        if str(known.status) != "READY":
            self._known[checkpoint.step] = self._finish(there, known, checkpoint.step)
        return made

    def _create(self, there: Destination, checkpoint: CheckpointRecord, policy: PolicyRecord) -> Any:
        tags = {
            RUN_TAG: self._run_id,
            STEP_TAG: str(checkpoint.step),
            VERSION_TAG: str(policy.version),
            SHA_TAG: policy.sha256,
            URI_TAG: policy_uri(self._settings, policy),
            "sao.checkpoint_uri": f"{self._settings.object_store}/{checkpoint.object_key}",
            CHECKPOINT_SHA_TAG: checkpoint.sha256,
            STATE_TAG: WHOLE,
        }
        return there.client.create_logged_model(
            there.experiment_id,
            name=f"step-{checkpoint.step}",
            source_run_id=there.run_id,
            tags=tags,
            params={"step": str(checkpoint.step), "policy_version": str(policy.version)},
            model_type="policy",
        )

    def _finish(self, there: Destination, model: Any, step: int) -> Any:
        """Link a new model to the run, then call it ready."""
        from mlflow.entities import LoggedModelOutput

        outputs = there.client.get_run(there.run_id).outputs
        if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
            there.client.log_outputs(there.run_id, [LoggedModelOutput(model.model_id, step)])
        return there.client.finalize_logged_model(model.model_id, "READY")

    def _retire(self, there: Destination, model: Any, step: int) -> None:
        """The checkpoint is gone: delete its model, or mark it while the policy's files are there."""
        assert self._known is not None
        policy = self._ledger.policy(self._run_id, int(model.tags[VERSION_TAG]))
        if policy.removed_at is not None:
            _delete(there, model)
            del self._known[step]
        elif model.tags[STATE_TAG] != POLICY_ONLY:
            model.tags[STATE_TAG] = POLICY_ONLY
            there.client.set_logged_model_tags(model.model_id, {STATE_TAG: POLICY_ONLY})

    def _score_all(self, there: Destination, children: Mapping[int, str], tasks: Any) -> None:
        """Give each model the metrics of the evaluations of its policy."""
        assert self._known is not None
        for evaluation in self._ledger.evaluations(self._run_id):
            for model in self._known.values():
                key = (str(model.model_id), milliseconds(evaluation.created_at))
                if model.tags[SHA_TAG] != evaluation.policy_sha256 or key in self._scored:
                    continue
                child = children.get(evaluation.number) or find_child(there, self._run_id, evaluation)
                if child is not None:
                    _score(there, str(model.model_id), evaluation, child, tasks)
                    self._scored.add(key)


def _delete(there: Destination, model: Any) -> None:
    """Delete a logged model, unless somebody did."""
    try:
        there.client.delete_logged_model(model.model_id)
    except Exception as error:
        if not is_absent(error):
            raise


def _score(there: Destination, model_id: str, evaluation: EvaluationRecord, child: str, tasks: Any) -> None:
    from mlflow.entities import LoggedModelInput

    some = points(
        evaluation.metrics,
        step=evaluation.step,
        at=evaluation.created_at,
        model_id=model_id,
        dataset_name=tasks.dataset.name,
        dataset_digest=tasks.dataset.digest,
        run_id=child,
    )
    for part in batches(some, _POINTS_PER_BATCH):
        there.client.log_batch(child, metrics=part, synchronous=True)
    there.client.log_inputs(child, models=[LoggedModelInput(model_id)])
