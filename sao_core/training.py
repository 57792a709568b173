"""The learner process: the stages and the update loop's verbs, over the protocols.

    prepare         model folder → (warm start) → first published policy; or everything from a checkpoint
    pretrain_value  waits for rollouts of the initial policy → critic
    update_value    waits for a claimed batch → K critic updates
    update_policy   advantages → policy → commit → publish → (checkpoint)

It waits only for complete rollouts and never for a particular one. Where they come from and where
results go is the protocols' business.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sao_core.config import ConfigError, TrainConfig
from sao_core.environments.base import EnvironmentSpec
from sao_core.learner import Learner
from sao_core.models.policy import load_policy, load_tokenizer, resolve_device, save_policy
from sao_core.models.tiny import build_tiny
from sao_core.protocols import Batch, BatchSource, Rollout, TasksOver, UpdateRecord, UpdateSink
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Purpose
from sao_core.value_pretraining import pretrain_value
from sao_core.warm_start import read_conversations, warm_start

logger = logging.getLogger(__name__)

POLL_S = 0.01


class Stopped(Exception):
    """The run was asked to stop while the learner waited."""


class LogprobMismatch(RuntimeError):
    """Recorded and recomputed log-probabilities disagree under the same weights."""


class Training:
    """One training run as its learner process sees it.

    ``say`` takes a short line of progress for people; ``stopping`` is polled while waiting.
    """

    def __init__(
        self,
        config: TrainConfig,
        environment: EnvironmentSpec,
        batches: BatchSource,
        updates: UpdateSink,
        folder: Path,
        say: Callable[[str], None],
        stopping: Callable[[], bool],
        threads: tuple[int, int],
    ) -> None:
        self.config = config
        self.environment = environment
        self.batches = batches
        self.updates = updates
        self.folder = folder
        self.say = say
        self.stopping = stopping
        self.threads_alone, self.threads_shared = threads
        self.step = 0
        self.version = 0
        self._checkpointed_step: int | None = None
        self._batch: Batch | None = None
        self._value_metrics: dict[str, float] = {}
        self._compared_logprobs = False
        self._started = time.monotonic()
        self._step_started = time.monotonic()
        self._idle_since = time.monotonic()
        self.learner: Learner

    # --- stages ---------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Load the newest complete checkpoint, or make the first policy and publish it."""
        torch.set_num_threads(self.threads_alone)
        checkpoint = self.updates.latest_checkpoint()
        if checkpoint is not None:
            return self._restore(*checkpoint)
        started = time.monotonic()
        folder, metrics = self._initial_policy()
        self.say("loading policy and critic")
        self.learner = Learner(self.config, folder, seed=self.config.seed, device=self.config.learner.device)
        self.version = self.updates.publish_initial(folder, step=0)
        return {
            "step": 0,
            "version": self.version,
            "critic_pretrained": self.learner.critic_pretrained,
            "prepare_s": time.monotonic() - started,
            **metrics,
        }

    def _restore(self, step: int, folder: Path) -> dict[str, Any]:
        self.say(f"resuming from the checkpoint of step {step}")
        self.learner = Learner(self.config, folder, seed=self.config.seed, device=self.config.learner.device)
        state = self.learner.load_checkpoint(folder)
        self.step = self._checkpointed_step = step
        self.version = int(state["version"])
        self._started -= float(state["elapsed_s"])
        rates = ", ".join(f"{name} {rate:g}" for name, rate in self.learner.learning_rates.items())
        logger.info("resumed at step %d with policy version %d; learning rates: %s", step, self.version, rates)
        return {"step": step, "version": self.version, "critic_pretrained": True}

    def _initial_policy(self) -> tuple[Path, dict[str, float]]:
        settings = self.config.model
        source = Path(settings.path)
        if settings.path == "tiny":
            source = self.folder / "tiny"
            build_tiny(source, seed=self.config.seed)
        if not self.config.warm_start.enabled:
            return source, {}
        return self._warm_start(source)

    def _warm_start(self, source: Path) -> tuple[Path, dict[str, float]]:
        """Supervised training of the policy in ``source``; returns the folder of the result."""
        started = time.monotonic()
        settings, seed = self.config.warm_start, self.config.seed
        if settings.path is not None:
            conversations = read_conversations(Path(settings.path), limit=settings.demonstrations)
        else:
            conversations = self._demonstrations(settings.demonstrations)
        model = load_policy(source, self.config.model.dtype, resolve_device(self.config.learner.device))
        tokenizer = load_tokenizer(source)

        def on_step(done: int, total: int, loss: float) -> None:
            self._check_stop()
            self.say(f"warm start {done}/{total} · loss {loss:.3f}")

        micro_batch_tokens = self.config.learner.micro_batch_tokens
        metrics = warm_start(model, Renderer(tokenizer), conversations, settings, seed, on_step, micro_batch_tokens)
        target = self.folder / "warm_start"
        save_policy(model, tokenizer, target)
        return target, {**metrics, "warm_start_s": time.monotonic() - started}

    def _demonstrations(self, count: int) -> list[tuple[Message, ...]]:
        if self.environment.demonstrations is None:
            raise ConfigError(
                f"environment `{self.environment.name}` has no demonstrator: set warm_start.path to a JSONL of "
                f"`messages`, or warm_start.enabled=false"
            )
        options = self.environment.parse_options(self.config.environment.options)
        return list(self.environment.demonstrations(options, self.config.seed, count))

    def pretrain_value(self) -> dict[str, float]:
        """Train the critic on rollouts of the initial policy; returns held-out explained variance and times."""
        started = time.monotonic()
        wanted = self.config.critic.pretrain.rollouts
        while (ready := self.batches.collected(Purpose.VALUE_PRETRAIN)) < wanted:
            self._check_stop()
            self.say(f"value pretraining · collecting rollouts {ready}/{wanted}")
            time.sleep(0.1)
        rollouts = self.batches.read(Purpose.VALUE_PRETRAIN)
        collected_s = time.monotonic() - started
        self._compare_logprobs(rollouts)

        def on_epoch(epoch: int, explained_variance: float | None) -> None:
            self._check_stop()
            shown = "–" if explained_variance is None else f"{explained_variance:.3f}"
            self.say(f"value pretraining · epoch {epoch} · held-out explained variance {shown}")

        torch.set_num_threads(self.threads_alone)
        metrics = pretrain_value(self.learner, rollouts, self.config, on_epoch)
        return {**metrics, "collect_s": collected_s, "pretrain_value_s": time.monotonic() - started}

    def begin_updates(self) -> None:
        """Leave the other cores to the workers, and keep a checkpoint of the starting point."""
        torch.set_num_threads(self.threads_shared)
        if self._checkpointed_step is None:
            self.checkpoint()
        self._step_started = self._idle_since = time.monotonic()

    # --- one step -------------------------------------------------------------------------------

    def update_value(self, step: int) -> bool:
        """Claim the batch of ``step`` and make the K critic updates on it. A committed step is left alone.

        False if the tasks are over, so that there is no such step.
        """
        if step == self.step:
            return True
        orchestration_s = time.monotonic() - self._idle_since
        waiting_since = time.monotonic()
        try:
            self._batch = self._collect(step)
        except TasksOver:
            return False
        learner_wait_s = time.monotonic() - waiting_since
        if not self._compared_logprobs:
            self._compare_logprobs(list(self._batch.rollouts))
        computing_since = time.monotonic()
        metrics = self.learner.update_value(self._batch, self.batches.policy_steps())
        self._value_metrics = {
            **metrics,
            "time/orchestration_s": orchestration_s,
            "time/learner_wait_s": learner_wait_s,
            "time/value_s": time.monotonic() - computing_since,
        }
        self._idle_since = time.monotonic()
        return True

    def update_policy(self, step: int) -> None:
        """One policy update on the batch of ``step``; commit it, publish the policy, keep a checkpoint when due."""
        if step == self.step:
            return
        if self._batch is None or self._batch.step != step:
            raise RuntimeError(f"update_policy({step}) needs update_value({step}) first")
        orchestration_s = time.monotonic() - self._idle_since
        computing_since = time.monotonic()
        metrics = {**self._value_metrics, **self.learner.update_policy()}
        metrics["time/policy_s"] = time.monotonic() - computing_since
        metrics["time/orchestration_s"] += orchestration_s
        self._commit(step, self._batch, metrics)
        self._batch = None
        if step % self.config.learner.checkpoint_every == 0 or step == self.config.learner.updates:
            self.checkpoint()
        self._idle_since = time.monotonic()

    def _commit(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        storing_since = time.monotonic()
        moved = self.learner.policy_moved
        version = self.updates.next_version() if moved else self.version
        policy_folder = None
        if moved:
            policy_folder = self.folder / "policy"
            shutil.rmtree(policy_folder, ignore_errors=True)
            self.learner.save_policy(policy_folder)
        now = time.monotonic()
        metrics |= {f"queue/rejected/{reason}": float(count) for reason, count in batch.rejected.items()}
        metrics["queue/ready"] = float(batch.ready)
        metrics |= {
            "time/step_s": now - self._step_started,
            "time/elapsed_s": now - self._started,
            "time/store_s": now - storing_since,
            "throughput/tokens_per_s": metrics["rollout/tokens_total"] / max(now - self._step_started, 1e-9),
        }
        self.updates.commit(
            UpdateRecord(
                step=step,
                version_before=self.version,
                version_after=version,
                metrics=metrics,
                trained=tuple(self.learner.trained_ids),
                rejected=dict(self.learner.rejected),
                tokens=self._token_records(),
            ),
            policy_folder,
        )
        self.step, self.version = step, version
        self._step_started = now

    def _token_records(self) -> dict[str, dict[str, Any]]:
        if self.config.learner.record_tokens == "none":
            return {}
        records = self.learner.token_records()
        if self.config.learner.record_tokens == "sample":
            return dict(list(records.items())[:8])
        return records

    # --- keeping and stopping -------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Keep policy, critic, optimizers, schedulers and random states of the last committed step."""
        folder = self.folder / f"checkpoint-{self.step}"
        shutil.rmtree(folder, ignore_errors=True)
        elapsed_s = time.monotonic() - self._started
        self.learner.save_checkpoint(folder, {"step": self.step, "version": self.version, "elapsed_s": elapsed_s})
        self.updates.checkpoint(self.step, folder)
        self._checkpointed_step = self.step

    def close(self, finish_step: bool = True) -> None:
        """Keep a checkpoint and leave; first ``finish_step``, if its critic updates are done."""
        if self._checkpointed_step is None:
            return
        if finish_step and self._batch is not None:
            self.update_policy(self._batch.step)
        if self._checkpointed_step != self.step:
            self.checkpoint()
        self.updates.flush()

    def _collect(self, step: int) -> Batch:
        while (batch := self.batches.claim(step)) is None:
            self._check_stop()
            self.say(f"update {step} · waiting for rollouts")
            time.sleep(POLL_S)
        self.say(f"update {step}")
        return batch

    def _compare_logprobs(self, rollouts: list[Rollout]) -> None:
        """Refuse to train where engine and learner disagree under the same weights."""
        same = [r for r in rollouts if all(s.version_min == s.version_max == self.version for s in r)][:16]
        if not same:
            return
        self._compared_logprobs = True
        gap, limit = self.learner.logprob_gap(same), self.config.learner.logprob_tolerance
        if not gap <= limit:
            raise LogprobMismatch(
                f"recorded and recomputed log-probabilities differ by {gap:.3g} on average under the same weights, "
                f"over learner.logprob_tolerance={limit:g}: engine and learner do not compute the same distribution "
                f"(temperature, template or precision); raise the limit only for bfloat16 (0.03)"
            )

    def _check_stop(self) -> None:
        if self.stopping():
            raise Stopped
