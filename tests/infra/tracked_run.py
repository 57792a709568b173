"""A run with evaluations, checkpoints and a tokenizer, as MLflow is told of it; its weights are a few bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from healthy_run import Maker
from infra_fixtures import Places, prompts, trajectory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from infra.evaluation_metrics import evaluation_metrics
from infra.ledger import Ledger, NewRequest
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.tracking import sender
from sao_core.config import TrainConfig, parse_config
from sao_core.trajectory import Message, Purpose, Role, Sampling, Trajectory, Turn

SUITE = "calculator"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENIZER = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(ALPHABET)}, []))
"""A token is a byte."""
TOKENIZER.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZER.decoder = decoders.ByteLevel()


def config(**sections: Any) -> TrainConfig:
    return parse_config({"recipe": "tiny", "evaluation": {"prompts": 4}} | sections)


class TrackedRun:
    """One run; every step publishes a policy, whose number is the step's unless there was a rewind."""

    def __init__(self, settings: Settings, run_id: str, **sections: Any) -> None:
        self.settings, self.run_id, self.config = settings, run_id, config(**sections)
        self.ledger, self.objects = Ledger(settings.database_url), ObjectStore.from_settings(settings)
        self.ledger.create_run(run_id, self.config.recipe, "sao", self.config.model_dump(mode="json"))
        self._folders = 0
        self.attempt()
        self.maker.updates.publish_initial(self.folder("version 0"), step=0)

    def attempt(self) -> None:
        """Start the run, or start it again."""
        places = Places(self.settings.database_url, self.settings.object_store, None, self.settings.cache)
        tmp = self.settings.home / "made"
        self.maker = Maker(places, self.ledger, self.objects, self.run_id, tmp, keep_policies=2)
        self.maker.folder = self.folder  # type: ignore[method-assign]

    def folder(self, text: str) -> Path:
        """A new folder with weights and a tokenizer."""
        self._folders += 1
        path = Path(self.settings.home, "made", self.run_id, str(self._folders))
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_text(TOKENIZER.to_str())
        (path / "model.safetensors").write_text(f"{self.run_id} {text}")
        return path

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.maker.issue(*prompts(2))
            self.maker.generate(2)
            self.maker.step(number)

    def checkpoint(self, step: int) -> None:
        self.maker.checkpoint(step)

    def evaluate(self, *scores: float, greedy: float | None = None) -> None:
        """Evaluate the newest policy: a score for each held-out prompt, and one for a greedy rollout."""
        policy = self.ledger.newest_policy(self.run_id)
        assert policy is not None
        version = policy.version
        draws = [(f"evaluation/{i}", score, Sampling()) for i, score in enumerate(scores)]
        if greedy is not None:
            draws.append(("evaluation/0", greedy, Sampling(greedy=True)))
        evaluate = Purpose.EVALUATE
        self.maker.issue(*(NewRequest(evaluate, key, sampling=s, policy_version=version) for key, _, s in draws))
        for request, (key, score, _) in zip(self.maker.lease(len(draws)), draws, strict=True):
            assert request.prompt_key == key
            self.maker.put((conversation(request, score),))
        metrics = evaluation_metrics(SUITE, self.ledger.evaluation_rows(self.run_id, version))
        self.ledger.add_evaluation(self.run_id, policy.step, version, SUITE, metrics, policy.sha256)

    def complete(self) -> None:
        self.maker.close()
        self.ledger.set_status(self.run_id, "completed")


def conversation(request: Any, score: float) -> Trajectory:
    """A rollout of two turns with a calculator's answer between them."""
    said = ("find 1 plus 2", "calc: 1+2", "3", f"answer: {score:g}")
    ids = [TOKENIZER.encode(text).ids for text in said]
    edges = np.cumsum([0, *map(len, ids)])
    roles = (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT)
    turns = tuple(Turn(role, int(edges[i]), int(edges[i + 1])) for i, role in enumerate(roles))
    mask = np.zeros(edges[-1], np.bool_)
    for turn in turns:
        mask[turn.start : turn.stop] = turn.role is Role.ASSISTANT
    rewards = np.zeros(len(mask), np.float32)
    rewards[-1] = score
    version = request.policy_version
    return trajectory(
        request,
        tokens=len(mask),
        token_ids=np.concatenate(ids).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        rewards=rewards,
        score=score,
        turns=turns,
        messages=tuple(Message(role, text) for role, text in zip(roles, said, strict=True)),
        reward_parts={"correct": score},
        environment=SUITE,
        environment_version="1",
        timings={"started_at": 1_700_000_000.0, "duration_s": 3.0, "generation_s": 2.0, "environment_s": 1.0},
    )


def empty_home(folder: Path, mlflow: Path, ledger: Path, **environ: str) -> Settings:
    """Places in ``folder``, with copies of a migrated MLflow database and ledger: making those takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(mlflow, folder / "mlflow.db")
    shutil.copy(ledger, folder / "ledger.db")
    return Settings.from_environment({"SAO_HOME": str(folder), **environ}, folder)


@contextmanager
def no_charts() -> Iterator[None]:
    """Charts are empty files, to save the time that drawing takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender, "chart_png", lambda *_: b"a chart")
        patch.setattr(sender, "chart_html", lambda *_: "a chart")
        yield
