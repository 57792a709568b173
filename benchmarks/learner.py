"""One training step of the tiny model, and what DeepSpeed adds to it over plain PyTorch.

Prints one JSON line: median seconds of process time for the value part (K = 2 critic updates), the policy part (fresh
values, advantages, one update), and of one critic and one policy update each with the engine and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sao_core.batching import TrainingBatch
from sao_core.config import parse_config
from sao_core.learner import Learner
from sao_core.models.critic import Critic, freeze
from sao_core.models.logprobs import TokenScorer
from sao_core.models.policy import load_policy
from sao_core.models.tiny import build_tiny
from sao_core.objectives import dis_policy_loss, value_loss
from sao_core.protocols import Batch, Rollout
from sao_core.trajectory import Outcome, Purpose, Trajectory


def random_rollout(number: int, random: np.random.Generator) -> Rollout:
    """Two turns of about 18 sampled tokens behind a prompt of about 40; about 90 tokens in all."""
    mask = np.repeat([False, True, False, True], random.integers([30, 8, 8, 8], [50, 28, 28, 28]))
    score = float(random.integers(2))
    rewards = np.zeros(len(mask), np.float32)
    rewards[-1] = score
    return (
        Trajectory(
            trajectory_id=f"t{number}",
            run_id="benchmark",
            request_number=number,
            attempt=1,
            purpose=Purpose.TRAIN,
            prompt_key=f"p{number}",
            token_ids=random.integers(0, 300, len(mask)).astype(np.int32),
            action_mask=mask,
            behavior_logprobs=np.where(mask, -5.7, 0).astype(np.float32),
            policy_versions=np.where(mask, 0, -1).astype(np.int32),
            rewards=rewards,
            score=score,
            outcome=Outcome.COMPLETED,
            stop_reason="done",
        ),
    )


def seconds_in_turns(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Process times of each function, called in turns so that a busy machine slows all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if turn > 0:
                seconds[name].append(time.process_time() - start)
    return seconds


def plain_updates(
    folder: Path, learner: Learner, data: TrainingBatch, targets: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A critic and a policy update as one would write them in PyTorch alone."""
    critic = Critic.from_policy(folder, "float32", "cpu")
    freeze(critic, learner.algorithm.critic_trainable)
    scorer = TokenScorer(load_policy(folder), 1.0, 4096)
    optimizers: dict[str, Any] = {
        name: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-6, fused=True)
        for name, module in (("critic", critic), ("policy", scorer))
    }
    behavior = data.rows.behavior_logprobs

    def update_critic() -> None:
        for part in data.parts:
            values, _ = critic(part.token_ids)
            mask = part.gather(data.trained)
            value_loss(values, part.gather(targets), mask, data.num_action_tokens).backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 10.0)
        optimizers["critic"].step()
        optimizers["critic"].zero_grad()

    def update_policy() -> None:
        for part in data.parts:
            mask = part.gather(data.trained)
            logprobs, _ = scorer(part.token_ids, mask)
            loss, _ = dis_policy_loss(
                logprobs, part.gather(behavior), part.gather(targets), mask, 0.3, 5.0, data.num_action_tokens
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizers["policy"].step()
        optimizers["policy"].zero_grad()

    return update_critic, update_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = parse_config(
        {
            "policy": {"lr": 1e-6, "first_update_step": 1},
            "learner": {
                "batch_size": arguments.rollouts,
                "micro_batch_tokens": arguments.micro_batch_tokens,
                "zero_stage": arguments.zero_stage,
            },
        }
    )
    random = np.random.default_rng(0)
    rollouts = tuple(random_rollout(number, random) for number in range(arguments.rollouts))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        build_tiny(folder, seed=0)
        learner = Learner(config, folder, device="cpu")
        batch, data = Batch(step=1, rollouts=rollouts), learner.prepare(rollouts)
        targets = learner.critic.targets(data, None)
        plain_critic, plain_policy = plain_updates(folder, learner, data, targets)
        seconds = seconds_in_turns(
            {
                "update_value_s": lambda: learner.update_value(batch, {0: 0}),
                "update_policy_s": learner.update_policy,
                "critic_update_s": lambda: learner.critic.update(data, targets),
                "critic_update_plain_s": plain_critic,
                "policy_update_s": lambda: learner.policy.update(data, targets),
                "policy_update_plain_s": plain_policy,
            },
            arguments.repeats,
        )
    engine = np.add(seconds["critic_update_s"], seconds["policy_update_s"])
    plain = np.add(seconds["critic_update_plain_s"], seconds["policy_update_plain_s"])
    result = {
        **{name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "deepspeed_overhead": round(float(np.median(engine / plain)) - 1, 3),
        "tokens": int(data.rows.lengths.sum()),
        "parameters": sum(p.numel() for p in learner.policy.engine.module.parameters()),
        **vars(arguments),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
