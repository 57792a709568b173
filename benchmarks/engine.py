"""The Transformers engine against the same model's own ``generate`` with a plain cache, at equal batch.

Prints one JSON line: median tokens/s of both and the median of their ratios, measured in turns in one process.
``generate`` samples a full batch to one length, its best case. The engine refills its slots as rollouts of different
lengths end and records log-probabilities; once with rollouts of one turn, once of three turns with observations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sao_core.models.policy import load_policy
from sao_core.models.tiny import build_tiny
from sao_core.rollout.transformers_engine import TransformersEngine
from sao_core.trajectory import Sampling

PROMPT_TOKENS = 24
OBSERVATION_TOKENS = 6
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Time of the process itself is steadier where others use the machine too; meant for one thread."""


class Load:
    """Endless rollouts in all slots; each turn's length is uniform within a quarter of the mean."""

    def __init__(
        self, engine: TransformersEngine, turns: int, tokens: int, vocabulary: int, clock: Callable[[], float]
    ) -> None:
        self.clock = clock
        self.engine, self.turns, self.mean, self.vocabulary = engine, turns, tokens // turns, vocabulary
        self.random = np.random.default_rng(0)

    async def lane(self, slot: int) -> None:
        """Rollout after rollout in one slot."""
        number = slot
        while True:
            session = self.engine.open(Sampling(), number)
            new_ids = self.random.integers(1, self.vocabulary, PROMPT_TOKENS).tolist()
            for _ in range(self.turns):
                length = int(self.random.integers(self.mean * 3 // 4, self.mean * 5 // 4 + 1))
                await session.extend_and_sample(new_ids, {-1}, length)
                new_ids = self.random.integers(1, self.vocabulary, OBSERVATION_TOKENS).tolist()
            session.close()
            number += self.engine.slots

    async def start(self) -> None:
        """Run until the slots are out of step with each other, as they are in a long run."""
        self.tasks = [asyncio.create_task(self.lane(slot)) for slot in range(self.engine.slots)]
        self.tasks.append(asyncio.create_task(self.engine.run()))
        await self.tokens_per_s(3 * self.engine.slots * self.mean * self.turns)

    async def tokens_per_s(self, tokens: int) -> float:
        """Let the engine sample about so many tokens."""
        started, before = self.clock(), self.engine.stats.sampled_tokens
        while self.engine.stats.sampled_tokens - before < tokens:
            await asyncio.sleep(0)
        return (self.engine.stats.sampled_tokens - before) / (self.clock() - started)

    def stop(self) -> None:
        """Drop all rollouts."""
        for task in self.tasks:
            task.cancel()


@torch.inference_mode()
def generate_tokens_per_s(
    model: torch.nn.Module, prompts: torch.Tensor, tokens: int, clock: Callable[[], float]
) -> float:
    started = clock()
    output = model.generate(  # type: ignore[operator]
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert output.shape[1] == prompts.shape[1] + tokens
    return prompts.shape[0] * tokens / (clock() - started)


async def measure(folder: Path, slots: int, tokens: int, rounds: int, clock_name: str) -> dict[str, float | int | str]:
    clock = CLOCKS[clock_name]
    plain = load_policy(folder)
    vocabulary = plain.config.vocab_size
    prompts = torch.randint(1, vocabulary, (slots, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    generate_tokens_per_s(plain, prompts, tokens, clock)
    context = PROMPT_TOKENS + 3 * OBSERVATION_TOKENS + 2 * tokens
    results: dict[str, list[float]] = {"generate": [], "one_turn": [], "three_turns": []}
    for name, turns in (("one_turn", 1), ("three_turns", 3)):
        engine = TransformersEngine(load_policy(folder), 0, slots=slots, context=context)
        load = Load(engine, turns, tokens, vocabulary, clock)
        await load.start()
        for _ in range(rounds):
            results["generate"].append(generate_tokens_per_s(plain, prompts, tokens, clock))
            results[name].append(await load.tokens_per_s(slots * tokens))
        load.stop()
    generated = results["generate"]
    return {
        "benchmark": "engine",
        "slots": slots,
        "mean_tokens": tokens,
        "clock": clock_name,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in plain.parameters()),
        "generate_tokens_per_s": round(statistics.median(generated)),
        "engine_tokens_per_s": round(statistics.median(results["one_turn"])),
        "engine_three_turns_tokens_per_s": round(statistics.median(results["three_turns"])),
        "ratio": round(_ratio(results["one_turn"], generated[:rounds]), 3),
        "ratio_three_turns": round(_ratio(results["three_turns"], generated[rounds:]), 3),
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it the tiny model")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="mean tokens sampled per rollout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model
        if folder is None:
            folder = Path(scratch) / "tiny"
            build_tiny(folder, seed=0)
        work = measure(folder, arguments.slots, arguments.tokens, arguments.rounds, arguments.clock)
        print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main()
