"""Issues rollout requests: which prompts come next, and how many may be in the making.

Only the flow issues. What was issued and what is outstanding is read from the ledger, never counted
in memory, so a resumed run goes on where the ledger stands.
"""

from __future__ import annotations

from infra.ledger import Ledger, NewRequest, RequestState
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
        groups = (self._config.outstanding - self._ledger.outstanding(self._run_id)) // self._group_size
        return self._issue(Purpose.TRAIN, groups)

    def value_pretraining(self) -> int:
        """Issue what value pretraining still lacks, rollouts that came to nothing included; returns how many."""
        states = self._ledger.request_states(self._run_id, Purpose.VALUE_PRETRAIN)
        alive = sum(states.get(s, 0) for s in (RequestState.PENDING, RequestState.LEASED, RequestState.DONE))
        return self._issue(Purpose.VALUE_PRETRAIN, self._config.critic.pretrain.rollouts - alive)

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

    def _issue(self, purpose: Purpose, prompts: int) -> int:
        """Issue the next prompts, each once per member of a group; nothing if another call has just done so."""
        if prompts <= 0:
            return 0
        issued = {p: self._ledger.prompts_issued(self._run_id, p) for p in (Purpose.TRAIN, Purpose.VALUE_PRETRAIN)}
        position = sum(issued.values())
        size = self._group_size if purpose is Purpose.TRAIN else 1
        requests = [
            NewRequest(
                purpose,
                self.tasks.key_at(position + prompt),
                group=issued[purpose] + prompt if size > 1 else None,
                sampling=self._sampling,
            )
            for prompt in range(prompts)
            for _ in range(size)
        ]
        return len(self._ledger.issue(self._run_id, requests, frontier=issued[purpose]))
