"""What people see of a run in a terminal: live progress, and the result. Everything is read from the ledger."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.beside import REFRESH_S, Beside
from flows.links import places
from infra.ledger import EvaluationRecord, Ledger, UpdateRow
from infra.settings import Settings
from sao_core.trajectory import Purpose

PLAIN_STATE_EVERY_S = 5.0
"""Without a terminal a stage says how far it is this often; every update still has its line."""
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveProgress(Beside):
    """Shows a run while it trains: a panel in a terminal, one plain line per news elsewhere."""

    def __init__(self, ledger: Ledger, run_id: str, console: Console) -> None:
        super().__init__(ledger, run_id)
        self._console = console
        self._started = time.monotonic()
        self._updates: list[UpdateRow] = []
        self._first_step_at: tuple[float, int] | None = None

    def _show(self) -> None:
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4, transient=True) as live:
                while not self._done.wait(REFRESH_S):
                    live.update(self._panel())
            return
        said, said_at = "", 0.0
        while True:
            last = self._done.wait(REFRESH_S)
            line, now = self._line(), time.monotonic()
            if line != said and (self._updates or last or now - said_at >= PLAIN_STATE_EVERY_S):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
                said, said_at = line, now
            if last:
                return

    def _read(self) -> tuple[int, str]:
        """Fetch news; returns the number of steps to make and what the learner is at."""
        if not self._ledger.has_run(self._run_id):
            return 0, "starting"
        total = int(self._ledger.run(self._run_id).config["learner"]["updates"])
        step = self._updates[-1].step if self._updates else 0
        self._updates += self._ledger.updates_since(self._run_id, step)
        self._updates = self._updates[-400:]
        if self._updates and self._first_step_at is None:
            self._first_step_at = (time.monotonic(), self._updates[-1].step)
        states = {w.worker: w.state for w in self._ledger.workers(self._run_id)}
        return total, next((state for name, state in states.items() if name.startswith("learner")), "starting")

    def _time_left(self, total: int) -> str:
        if self._first_step_at is None or not self._updates:
            return "–"
        since, first = self._first_step_at
        done = self._updates[-1].step - first
        if done <= 0:
            return "–"
        return duration((time.monotonic() - since) / done * (total - self._updates[-1].step))

    def _panel(self) -> RenderableType:
        total, state = self._read()
        elapsed = duration(time.monotonic() - self._started)
        if not self._updates:
            return Text(f"{elapsed}  {state}")
        last = self._updates[-1]
        table = Table.grid(padding=(0, 2))
        for name, value in headline(last.metrics).items():
            table.add_row(Text(name, style="dim"), value)
        rewards = [u.metrics["reward/mean"] for u in self._updates if "reward/mean" in u.metrics]
        table.add_row(Text("reward", style="dim"), sparkline(rewards[-60:]))
        table.add_row(Text("time left", style="dim"), self._time_left(total))
        table.add_row(Text("progress", style="dim"), ProgressBar(total=total, completed=last.step, width=60))
        return Group(Text(f"{elapsed}  {state}  ·  update {last.step} of {total}"), table)

    def _line(self) -> str:
        total, state = self._read()
        if not self._updates:
            return state
        last = self._updates[-1]
        values = " · ".join(f"{name} {value}" for name, value in headline(last.metrics).items())
        return f"update {last.step}/{total} · {values}"


def headline(metrics: dict[str, float] | Any) -> dict[str, str]:
    """The handful of numbers that people watch, formatted."""
    shown = {
        "reward": ("reward/mean", "{:.3f}"),
        "explained variance": ("value/explained_variance", "{:.3f}"),
        "staleness": ("staleness/mean", "{:.2f}"),
        "rejected by the band": ("policy/band_rejected", "{:.2%}"),
        "tokens/s": ("throughput/tokens_per_s", "{:,.0f}"),
    }
    return {
        name: template.format(metrics[key]) for name, (key, template) in shown.items() if metrics.get(key) is not None
    }


def sparkline(values: list[float]) -> str:
    """Values as a line of blocks, lowest to highest."""
    if not values:
        return ""
    low, span = min(values), max(max(values) - min(values), 1e-9)
    return "".join(BLOCKS[int((v - low) / span * (len(BLOCKS) - 1))] for v in values)


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def evaluation_table(evaluations: list[EvaluationRecord]) -> Table:
    """First against last evaluation: all prompts, then by difficulty."""
    first, last = evaluations[0], evaluations[-1]
    table = Table(title=f"{last.suite}: held-out reward before and after")
    table.add_column("prompts")
    for heading in ("sampled, start", "sampled, end", "greedy, start", "greedy, end"):
        table.add_column(heading, justify="right")
    for label, cells in evaluation_rows(first, last):
        style = "bold" if label == "all" else ""
        table.add_row(label, *("–" if c is None else f"{c:.3f}" for c in cells), style=style)
    return table


def evaluation_rows(first: EvaluationRecord, last: EvaluationRecord) -> list[tuple[str, list[float | None]]]:
    """Mean reward of all prompts, then by difficulty: sampled in ``first`` and ``last``, greedy in both."""
    prefix = f"eval/{last.suite}/"
    difficulties = sorted(
        key.removeprefix(f"{prefix}difficulty_").removesuffix("/reward_mean")
        for key in last.metrics
        if key.startswith(f"{prefix}difficulty_") and key.endswith("/reward_mean")
    )
    parts = [("all", ""), *((f"difficulty {d}", f"difficulty_{d}/") for d in difficulties)]
    return [
        (
            label,
            [
                evaluation.metrics.get(f"{prefix}{part}{name}")
                for name in ("reward_mean", "greedy_reward_mean")
                for evaluation in (first, last)
            ],
        )
        for label, part in parts
    ]


def print_result(ledger: Ledger, settings: Settings, run_id: str, console: Console) -> None:
    """The end of a run: reward by difficulty, where everything is, what to try next."""
    evaluations = ledger.evaluations(run_id)
    if evaluations:
        console.print(evaluation_table(evaluations))
    console.print(links(ledger, settings, run_id), highlight=False, soft_wrap=True)
    next_steps = [f"sao show {run_id}", "sao runs", f"sao export {run_id} my-agent"]
    if trained := ledger.trajectories(run_id, Purpose.TRAIN, step=ledger.last_step(run_id)):
        next_steps.insert(1, f"sao trajectory {trained[0].trajectory_id}")
    console.print("\n".join(["", "next:", *(f"  {step}" for step in next_steps)]), highlight=False)


def links(ledger: Ledger, settings: Settings, run_id: str) -> str:
    """Where a run's parts are, as lines of text."""
    run = ledger.run(run_id)
    found = places(settings, run)
    if run.mlflow_run_id and "MLflow run" not in found:
        found["MLflow run"] = f"{run.mlflow_run_id}; `sao up` serves the pages"
    return "\n".join(f"{name:<18}{address}" for name, address in found.items())
