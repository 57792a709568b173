"""Issues rollout requests: which prompts come next, and how many may be in the making.

Only the flow issues. What was issued and what is outstanding is read from the ledger, never counted
in memory, so a resumed run goes on where the ledger stands.
"""

from __future__ import annotations

import sys

from infra.ledger import Ledger, NewRequest, RequestState
from sao_core.algorithms import resolve
from sao_core.config import ConfigError, TrainConfig
from sao_core.environments import base as environments
from sao_core.environments.base import TaskSource, random_of
from sao_core.trajectory import Purpose, Sampling


class PromptIssuer:
    """The one who issues requests of a run."""

    def __init__(self, ledger: Ledger, run_id: str, config: TrainConfig) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._config = config
        self._group_size = resolve(config).group_size
        environment = environments.get(config.environment.name)
        options = environment.parse_options(config.environment.options)
        self.tasks = environment.tasks(options, config.seed)
        self._epoch_size = check_end(config, self.tasks)
        self._sampling = Sampling(temperature=config.rollout.temperature)

    def fill(self) -> int:
        """Issue training requests up to the bound (run_ahead + 1) × batch_size; returns how many."""
        groups = (self._config.outstanding - self._ledger.outstanding(self._run_id)) // self._group_size
        return self._issue(Purpose.TRAIN, groups) if groups > 0 else 0

    def value_pretraining(self) -> int:
        """Issue what value pretraining still lacks, rollouts that came to nothing included; returns how many."""
        states = self._ledger.request_states(self._run_id, Purpose.VALUE_PRETRAIN)
        alive = sum(states.get(s, 0) for s in (RequestState.PENDING, RequestState.LEASED, RequestState.DONE))
        lacking = self._config.critic.pretrain.rollouts - alive
        return self._issue(Purpose.VALUE_PRETRAIN, lacking) if lacking > 0 else 0

    def evaluation(self, version: int) -> int:
        """Issue the held-out prompts for one policy version, sampled and greedy; returns how many rollouts."""
        settings = self._config.evaluation
        keys = self.tasks.evaluation_keys(settings.prompts)
        sampled = Sampling(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
        draws = [sampled] * settings.samples_per_prompt
        if settings.greedy:
            draws.append(Sampling(greedy=True))
        requests = [
            NewRequest(Purpose.EVALUATE, key, sampling=sampling, policy_version=version)
            for sampling in draws
            for key in keys
        ]
        self._ledger.issue(self._run_id, requests)
        return len(requests)

    def _issue(self, purpose: Purpose, prompts: int) -> int:
        """Issue the next prompts, each once per member of a group; nothing if another call has just done so."""
        issued = {p: self._ledger.prompts_issued(self._run_id, p) for p in (Purpose.TRAIN, Purpose.VALUE_PRETRAIN)}
        frontier, position = issued[purpose], sum(issued.values())
        if purpose is Purpose.TRAIN and self._config.environment.ends:
            position = frontier  # an epoch begins with the first update, whatever was asked before
            prompts = min(prompts, self._left(frontier))
        keys = [self._key_at(position + prompt) for prompt in range(prompts)]
        size = self._group_size if purpose is Purpose.TRAIN else 1
        requests = [
            NewRequest(purpose, key, group=frontier + prompt if size > 1 else None, sampling=self._sampling)
            for prompt, key in enumerate(keys)
            if key is not None
            for _ in range(size)
        ]
        numbers = self._ledger.issue(self._run_id, requests, frontier=frontier)
        if purpose is Purpose.TRAIN and self._config.environment.ends and (not keys or None in keys):
            self._ledger.close_frontier(self._run_id)
        return len(numbers)

    def _left(self, frontier: int) -> int:
        """Prompts that are still to be asked."""
        epochs, size = self._config.environment.epochs, self._epoch_size
        return sys.maxsize if epochs is None or size is None else epochs * size - frontier

    def _key_at(self, position: int) -> str | None:
        """The prompt at ``position``, or, if it is to be dropped, another one of its epoch; None if all are."""
        key, window, size = self.tasks.key_at(position), self._config.environment.drop_after, self._epoch_size
        if window is None or size is None:
            return key
        epoch = position // size
        others = random_of("instead", position).sample(range(size), size)
        for candidate in (key, *(self.tasks.key_at(epoch * size + other) for other in others)):
            rewards = self._ledger.prompt_rewards(self._run_id, [candidate], window)[candidate]
            if len(rewards) < window or len(set(rewards)) > 1:
                return candidate
        return None


def check_end(config: TrainConfig, tasks: TaskSource) -> int | None:
    """After how many prompts ``tasks`` have gone round; None if they never do.

    Raises ConfigError if the settings need a finite set of tasks, and these are endless.
    """
    size: int | None = getattr(tasks, "epoch_size", None)
    if config.environment.ends and size is None:
        setting = "epochs" if config.environment.epochs is not None else "drop_after"
        raise ConfigError(
            f"environment.{setting} needs a finite set of tasks, and those of `{config.environment.name}` never come "
            f"back: leave it empty (with calculator, environment.options.train_tasks makes them finite)"
        )
    return size
