"""Rollouts, reward model and learner together, in one process: a few updates make what is liked more frequent."""

import asyncio

import numpy as np
import pytest
from classifier_fixtures import share_classifier
from learner_fixtures import make_config
from rollout_fixtures import letter_tokenizer, request, small_model

from sao_core.environments import get
from sao_core.learner import Learner
from sao_core.models.policy import load_policy, save_policy
from sao_core.outside import Outside
from sao_core.protocols import Batch
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.renderer import Renderer
from sao_core.rollout.transformers_engine import TransformersEngine

UPDATES, BATCH = 7, 32
SPEC = get("reward_model")


@pytest.mark.long
def test_a_few_updates_raise_what_the_reward_model_likes(tmp_path):
    tokenizer = letter_tokenizer()
    policy = tmp_path / "policy"
    save_policy(small_model(0, vocabulary=len(tokenizer), spread=0.1), tokenizer, policy)
    vowels = {tokenizer.convert_tokens_to_ids(letter) for letter in "aei"}
    judge = share_classifier(tmp_path / "judge", tokenizer, vowels)
    options = SPEC.parse_options({"model": str(judge), "reads": "reply", "device": "cpu"})
    config = make_config(
        policy={"lr": 5e-3},
        critic={"lr": 1e-2},
        learner={"batch_size": BATCH, "micro_batch_tokens": 4096},
        rollout={"max_action_tokens": 12, "max_context_tokens": 96},
    )
    source = SPEC.tasks(options, 0)
    renderer = Renderer(tokenizer)

    async def train():
        learner = Learner(config, policy, seed=0, device="cpu")
        engine = TransformersEngine(load_policy(policy), 0, slots=BATCH, context=96, on_swap="recompute")
        running = asyncio.create_task(engine.run())

        async def one(number):
            return await run_rollout(
                request(number),
                engine,
                SPEC.make(options, Outside()),
                source.task(source.key_at(number)),
                renderer,
                config.rollout,
                environment_name="reward_model",
                seed=0,
            )

        means = []
        for step in range(1, UPDATES + 1):
            rollouts = await asyncio.gather(*(one(step * BATCH + index) for index in range(BATCH)))
            means.append(float(np.mean([rollout[0].score for rollout in rollouts])))
            learner.update_value(Batch(step=step, rollouts=tuple(rollouts)), {step - 1: step - 1})
            learner.update_policy()
            learner.save_policy(tmp_path / f"{step}")
            await engine.swap(tmp_path / f"{step}", step)
        running.cancel()
        return means

    means = asyncio.run(train())
    assert np.mean(means[-3:]) > np.mean(means[:2]) + 0.1, means
