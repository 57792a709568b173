"""What the children of a run are: learner, rollout worker, evaluator. Each wires sao_core's loops to this run's places.

They meet only in ledger and object store, and import neither Prefect nor MLflow.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import traceback
from collections.abc import Iterable

from infra.attempts import LEARNER, STOPPING
from infra.checkpoints import CheckpointStore
from infra.child import Channel
from infra.learner_ports import LedgerBatches, LedgerUpdates
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.policy_store import PolicyStore
from infra.requests import LedgerRequests, new_worker_id
from infra.sandbox.runner import Sandbox
from infra.settings import ChatKeys, Settings
from infra.trajectory_store import TrajectoryStore, TrajectoryWriter
from sao_core.algorithms import resolve
from sao_core.config import TrainConfig
from sao_core.environments import base as environments
from sao_core.outside import Outside
from sao_core.trajectory import Purpose

logger = logging.getLogger(__name__)

SAY_EVERY_S = 0.4
"""Progress is written to the ledger at most this often."""
HEARTBEAT_S = 5.0


class Heart:
    """Keeps telling the ledger that this process lives and what it is at."""

    def __init__(self, channel: Channel, requests: LedgerRequests) -> None:
        self._channel = channel
        self._requests = requests
        self._state = "starting"
        self._said_at = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def say(self, state: str) -> None:
        """Show a short line of progress; cheap enough to call in a loop."""
        now = time.monotonic()
        if state == self._state or now - self._said_at < SAY_EVERY_S:
            return
        self._state, self._said_at = state, now
        self._channel.progress(state=state)
        self._requests.heartbeat(state, None)

    def stop(self, state: str) -> None:
        """Stop beating, with a last word."""
        self._done.set()
        self._thread.join()
        self._requests.heartbeat(state, None)

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_S):
            self._requests.heartbeat(STOPPING if self._channel.stop.is_set() else self._state, None)


def learner(
    channel: Channel, run_id: str, attempt: int, settings: Settings, config: TrainConfig, threads: tuple[int, int]
) -> None:
    """The learner process: serves the verbs of :class:`sao_core.training.Training` until told to stop."""
    from sao_core.parallel import NonFiniteGradients
    from sao_core.training import Stopped, Training

    ledger = Ledger(settings.database_url)
    objects = ObjectStore.from_settings(settings)
    environment = environments.get(config.environment.name)
    shutil.rmtree(settings.scratch / run_id, ignore_errors=True)  # of attempts that were killed
    scratch = settings.scratch / run_id / str(attempt)
    scratch.mkdir(parents=True)
    heart = Heart(channel, LedgerRequests(ledger, run_id, new_worker_id(LEARNER), (), config.rollout.lease_s))
    checkpoints = CheckpointStore(
        objects, ledger, run_id, settings.cache, keep=config.learner.keep_checkpoints, attempt=attempt
    )
    updates = LedgerUpdates(
        ledger,
        PolicyStore(objects, ledger, settings.cache),
        checkpoints,
        run_id,
        keep_policies=config.asynchrony.keep_policies,
        attempt=attempt,
    )
    batches = LedgerBatches(
        ledger,
        TrajectoryStore(objects),
        run_id,
        resolve(config),
        config.learner.batch_size,
        attempt=attempt,
        ends=config.environment.ends,
    )
    training = Training(
        config,
        environment,
        batches,
        updates,
        scratch,
        heart.say,
        channel.stop.is_set,
        threads,
    )
    verbs = (
        training.prepare,
        training.pretrain_value,
        training.begin_updates,
        training.update_value,
        training.update_policy,
    )
    try:
        channel.serve({verb.__name__: verb for verb in verbs})
        training.close()
    except Stopped:
        training.close()
    except NonFiniteGradients:
        training.close(finish_step=False)
        raise
    updates.close()
    heart.stop("stopped")
    shutil.rmtree(scratch, ignore_errors=True)


def rollout_worker(
    channel: Channel, run_id: str, attempt: int, settings: Settings, config: TrainConfig, threads: int
) -> None:
    """A rollout worker process: serves training and value-pretraining requests until told to stop."""
    _serve(
        channel, run_id, attempt, settings, config, threads, (Purpose.TRAIN, Purpose.FEEDBACK, Purpose.VALUE_PRETRAIN)
    )


def evaluator(
    channel: Channel, run_id: str, attempt: int, settings: Settings, config: TrainConfig, threads: int
) -> None:
    """The evaluation process: serves evaluation requests, each with the policy version that it pins."""
    _serve(channel, run_id, attempt, settings, config, threads, (Purpose.EVALUATE,))


def lone_evaluator(
    channel: Channel, run_id: str, attempt: int, settings: Settings, config: TrainConfig, threads: int
) -> None:
    """The evaluation process of a run that has no learner: publishes the model itself, then serves."""
    from infra.evaluated_model import publish_model

    channel.progress(state="publishing the model")
    ledger = Ledger(settings.database_url)
    policies = PolicyStore(ObjectStore.from_settings(settings), ledger, settings.cache)
    publish_model(ledger, policies, run_id, attempt, config.model.path, config.seed, settings.scratch)
    evaluator(channel, run_id, attempt, settings, config, threads)


def _serve(
    channel: Channel,
    run_id: str,
    attempt: int,
    settings: Settings,
    config: TrainConfig,
    threads: int,
    purposes: Iterable[Purpose],
) -> None:
    import torch

    from infra.agent_process import AgentPrograms
    from infra.capture import CaptureEndpoint
    from infra.chat_models import HttpChatModels
    from sao_core.rollout.worker import run_worker

    torch.set_num_threads(threads)
    ledger = Ledger(settings.database_url)
    objects = ObjectStore.from_settings(settings)
    environment = environments.get(config.environment.name)
    tasks = environment.tasks(environment.parse_options(config.environment.options), config.seed)
    worker = new_worker_id(channel.name)
    requests = LedgerRequests(
        ledger, run_id, worker, purposes, config.rollout.lease_s, attempt=attempt, window=config.outstanding
    )
    writer = TrajectoryWriter(
        ledger, TrajectoryStore(objects), run_id, worker, flush_interval_s=config.rollout.flush_interval_s
    )
    feed = PolicyStore(objects, ledger, settings.cache).feed(run_id)
    sandbox = Sandbox(settings.sandbox)
    outside = Outside(
        code_runner=sandbox,
        chat_models=HttpChatModels(ChatKeys.from_environment()),
        chat_endpoint=CaptureEndpoint(),
        program_starter=AgentPrograms(),
    )
    try:
        stats = run_worker(config, requests, writer, feed, environment, tasks, channel.stop.is_set, outside=outside)
    except Exception:
        requests.report_failure(traceback.format_exc())
        raise
    finally:
        sandbox.close()
    writer.close()
    requests.release()
    logger.info("%s: %s", worker, stats)
