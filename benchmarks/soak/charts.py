"""The soak's charts, as small PNGs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

MAX_POINTS = 600


@contextmanager
def _chart(path: Path, x: str, y: str) -> Iterator[Axes]:
    figure, axes = plt.subplots(figsize=(7.2, 2.7), dpi=100, layout="constrained")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(path, pil_kwargs={"optimize": True})
    plt.close(figure)


def steps(path: Path, updates: Sequence[dict[str, Any]], kills: Sequence[float], starts: Sequence[float]) -> None:
    """Committed steps over time, with what was done to the run."""
    begin = starts[0] if starts else 0.0
    with _chart(path, "minutes", "step") as axes:
        axes.plot([(u["at"] - begin) / 60 for u in updates], [u["step"] for u in updates], color="tab:blue")
        for index, kill in enumerate(kills):
            label = "a worker is killed" if index == 0 else None
            axes.axvline((kill - begin) / 60, color="tab:red", linewidth=0.7, alpha=0.6, label=label)
        for index, start in enumerate(starts[1:]):
            label = "the run is resumed" if index == 0 else None
            axes.axvline((start - begin) / 60, color="tab:green", linewidth=1.2, label=label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        if kills or len(starts) > 1:
            axes.legend(frameon=False, loc="upper left")


def memory(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Resident memory of each part of the run; a new process is a new line of the same colour."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for process, megabytes in line.get("memory", {}).items():
            series.setdefault(process, []).append(((line["at"] - lines[0]["at"]) / 60, megabytes))
    parts = sorted({process.partition("/")[0] for process in series} - {"keeper"})
    colours = {part: plt.get_cmap("tab10")(index % 10) for index, part in enumerate(parts)}
    named: set[str] = set()
    with _chart(path, "minutes", "resident MB") as axes:
        for process, points in series.items():
            part = process.partition("/")[0]
            if part in colours and len(points) > 1:
                at, megabytes = zip(*thinned(points), strict=True)
                label = None if part in named else part
                axes.plot(at, megabytes, color=colours[part], linewidth=1.1, label=label)
                named.add(part)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))


def queue(path: Path, updates: Sequence[dict[str, Any]], bound: int) -> None:
    """Updates that passed between the last token of a rollout and its use, mean of each batch."""
    surviving = thinned([(u["step"], u["lag"]) for u in updates if not u["superseded"]])
    with _chart(path, "step", "queue lag, updates") as axes:
        axes.plot([step for step, _ in surviving], [lag for _, lag in surviving], linewidth=0.7)
        axes.axhline(bound, color="tab:red", linestyle="--", label="bound")
        axes.set_ylim(0, bound * 1.1)
        axes.legend(frameon=False, loc="center right")


def used(path: Path, shares: Sequence[float | None], lengths: Sequence[int]) -> None:
    """Used ÷ issued by length."""
    edges: list[int] = np.quantile(lengths, np.linspace(0, 1, len(shares) + 1)).astype(int).tolist() if lengths else []
    names = [f"{low}–{high}" for low, high in pairwise(edges)]
    with _chart(path, "tokens of the task, in tenths of the tasks", "used ÷ issued") as axes:
        axes.bar(names or range(len(shares)), [share or 0.0 for share in shares], color="tab:blue", width=0.7)
        axes.axhspan(0.98, 1.02, color="tab:green", alpha=0.15)
        axes.set_ylim(0, 1.05)
        axes.tick_params(axis="x", labelsize=8)


def durations(path: Path, lengths: Sequence[int], seconds: Sequence[float]) -> None:
    """From issue to record, by length."""
    points = thinned(sorted(zip(lengths, seconds, strict=True)), 4 * MAX_POINTS)
    with _chart(path, "tokens of the task", "seconds from issue to record") as axes:
        axes.scatter([x for x, _ in points], [y for _, y in points], s=3, alpha=0.4, linewidths=0)
        axes.set_xscale("log")
        axes.set_yscale("log")


def thinned(points: Sequence[tuple[Any, Any]], most: int = MAX_POINTS) -> list[tuple[Any, Any]]:
    """Every n-th point."""
    return list(points[:: max(1, -(-len(points) // most))])
