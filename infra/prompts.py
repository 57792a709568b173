"""Issues rollout requests: which prompts come next, and how many may be in the making.

Only the flow issues. What was issued and what is outstanding is read from the ledger, never counted
in memory, so a resumed run goes on where the ledger stands.
"""

from __future__ import annotations

from infra.ledger import Ledger, NewRequest
from sao_core.algorithms import resolve
from sao_core.config import TrainConfig
from sao_core.environments import base as environments
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
        self._sampling = Sampling(temperature=config.rollout.temperature)

    def fill(self) -> int:
        """Issue training requests up to the bound (run_ahead + 1) × batch_size; returns how many."""
        bound = (self._config.run_ahead + 1) * self._config.learner.batch_size
        groups = (bound - self._ledger.outstanding(self._run_id)) // self._group_size
        if groups <= 0:
            return 0
        position = self._frontier()
        grouped = self._group_size > 1
        requests = [
            NewRequest(
                Purpose.TRAIN,
                self.tasks.key_at(position + g),
                group=position + g if grouped else None,
                sampling=self._sampling,
            )
            for g in range(groups)
            for _ in range(self._group_size)
        ]
        self._ledger.issue(self._run_id, requests)
        return len(requests)

    def value_pretraining(self) -> int:
        """Issue the rollouts of value pretraining that are not issued yet; returns how many."""
        missing = self._config.critic.pretrain.rollouts - self._ledger.prompts_issued(
            self._run_id, Purpose.VALUE_PRETRAIN
        )
        position = self._frontier()
        self._ledger.issue(
            self._run_id,
            [
                NewRequest(Purpose.VALUE_PRETRAIN, self.tasks.key_at(position + i), sampling=self._sampling)
                for i in range(max(missing, 0))
            ],
        )
        return max(missing, 0)

    def evaluation(self, version: int) -> int:
        """Issue the held-out prompts for one policy version, sampled and greedy; returns how many rollouts."""
        settings = self._config.evaluation
        keys = self.tasks.evaluation_keys(settings.prompts)
        draws = [Sampling(temperature=1.0)] * settings.samples_per_prompt
        if settings.greedy:
            draws.append(Sampling(greedy=True))
        requests = [
            NewRequest(Purpose.EVALUATE, key, sampling=sampling, policy_version=version)
            for sampling in draws
            for key in keys
        ]
        self._ledger.issue(self._run_id, requests)
        return len(requests)

    def _frontier(self) -> int:
        """How many training prompts were issued: the position of the next one."""
        trained = self._ledger.prompts_issued(self._run_id, Purpose.TRAIN) // self._group_size
        return trained + self._ledger.prompts_issued(self._run_id, Purpose.VALUE_PRETRAIN)
