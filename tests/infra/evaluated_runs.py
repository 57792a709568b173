"""Evaluations of models that are only scores, through the same requests, store and desk as real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from infra_fixtures import LEASE_S, policy, trajectory

from infra.evaluation_comparison import Evaluated, find_evaluation
from infra.evaluations import EvaluationDesk
from infra.ledger import Ledger
from infra.objects import ObjectStore
from infra.prompts import PromptIssuer
from infra.trajectory_store import TrajectoryStore
from sao_core.config import TrainConfig, parse_config
from sao_core.protocols import RolloutRequest
from sao_core.trajectory import Purpose, Trajectory

Answer = Callable[[str, int], "float | Mapping[str, Any] | None"]
"""Prompt and sample (0, 1, …; greedy comes last) → score, or fields of the trajectory; None: every attempt fails."""


def config(**evaluation: Any) -> TrainConfig:
    settings = {"alone": True, "prompts": 4, "samples_per_prompt": 2, "greedy": False, **evaluation}
    return parse_config({"recipe": "evaluate-calculator", "model": {"path": "somewhere"}, "evaluation": settings})


class Bench:
    """One ledger and one store, in a folder."""

    def __init__(self, folder: Path, migrated: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ledger.db").write_bytes(migrated.read_bytes())
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.db'}")
        self.store = TrajectoryStore(ObjectStore(str(folder / "objects")))

    def evaluate(
        self, run_id: str, answer: Answer, settings: TrainConfig | None = None, version: str = "1"
    ) -> Evaluated:
        """The finished evaluation of ``answer``."""
        settings = settings or config()
        self.ask(run_id, settings)
        self.answer(run_id, answer, version)
        assert self.desk(run_id, settings).collect() == 0
        return find_evaluation(self.ledger, run_id)

    def ask(self, run_id: str, settings: TrainConfig) -> None:
        values = settings.model_dump(mode="json")
        self.ledger.create_run(run_id, settings.recipe, "sao", values)
        self.ledger.begin_attempt(run_id)
        self.ledger.add_policy(run_id, policy(0), step=0)
        self.desk(run_id, settings).request(PromptIssuer(self.ledger, run_id, settings))

    def desk(self, run_id: str, settings: TrainConfig) -> EvaluationDesk:
        return EvaluationDesk(self.ledger, run_id, settings)

    def lease(self, run_id: str) -> list[RolloutRequest]:
        return self.ledger.lease(run_id, "w", (Purpose.EVALUATE,), 1000, LEASE_S)

    def answer(self, run_id: str, answer: Answer, version: str = "1") -> None:
        seen: Counter[str] = Counter()
        made: list[Trajectory] = []
        for request in self.lease(run_id):
            given = answer(request.prompt_key, seen[request.prompt_key])
            seen[request.prompt_key] += 1
            if given is None:
                self.fail(run_id, request)
            else:
                fields = dict(given) if isinstance(given, Mapping) else {"score": given}
                made.append(answered(request, environment_version=version, **fields))
        if not made:
            return
        rows = self.store.write(f"runs/{run_id}/trajectories/{len(seen)}.parquet", [(one,) for one in made])
        assert len(self.ledger.record(run_id, "w", rows)) == len(made)

    def fail(self, run_id: str, request: RolloutRequest) -> None:
        """Fail a request until it is exhausted."""
        self.ledger.fail_attempt(run_id, "w", request.number, request.attempt, "broken")
        for again in self.lease(run_id):
            assert again.number == request.number
            self.fail(run_id, again)


def answered(request: RolloutRequest, *, score: float, tokens: int = 12, **more: Any) -> Trajectory:
    rewards = np.zeros(tokens, np.float32)
    rewards[-1] = score
    values = {"timings": {"duration_s": 2.0}, "difficulty": "", **more}
    return trajectory(request, tokens=tokens, score=score, rewards=rewards, **values)
