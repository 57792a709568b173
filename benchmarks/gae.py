"""Skip-observation GAE against ``torch.cumsum`` over the same array, in one process.

Prints one JSON line: medians in seconds, and their ratio, for several masks and λ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from sao_core.advantages import adaptive_lambda, skip_observation_gae


def median_s(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def turns_mask(rows: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, tokens) bool: actions and observations alternate, in runs of random length."""
    change = torch.rand(rows, tokens, generator=generator) < 1 / 200
    return change.cumsum(1) % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.tokens)
    values = torch.rand(shape, generator=generator)
    rewards = torch.zeros(shape)
    rewards[:, -1] = 1.0
    masks = {
        "turns": turns_mask(*shape, generator),
        "random": torch.rand(shape, generator=generator) < 0.5,
        "all": torch.ones(shape, dtype=torch.bool),
    }
    lambdas = {"0": 0.0, "0.95": 0.95, "1-5e-6": 1 - 5e-6}
    cases: dict[str, tuple[torch.Tensor, float | torch.Tensor]]
    cases = {f"turns, lambda {name}": (masks["turns"], lam) for name, lam in lambdas.items()}
    cases |= {f"{name}, adaptive": (mask, adaptive_lambda(mask.sum(1))) for name, mask in masks.items()}

    cumsum_s = median_s(lambda: torch.cumsum(values, dim=1), arguments.repeats)
    gae_s = {
        name: median_s(partial(skip_observation_gae, rewards, values, mask, 1.0, lam), arguments.repeats)
        for name, (mask, lam) in cases.items()
    }
    figures = {
        "benchmark": "gae",
        "rows": arguments.rows,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "dtype": "float32",
        "cumsum_s": round(cumsum_s, 4),
        "gae_s": {name: round(seconds, 4) for name, seconds in gae_s.items()},
        "ratio": {name: round(seconds / cumsum_s, 2) for name, seconds in gae_s.items()},
        "largest_ratio": round(max(gae_s.values()) / cumsum_s, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
