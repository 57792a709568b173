"""What people see of an evaluation: its progress, its figures with their intervals, and two of them compared."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flows.beside import REFRESH_S, Beside
from infra.evaluation_comparison import EvaluationComparison, Side
from infra.evaluation_metrics import interval_of
from infra.ledger import EvaluationRecord, Ledger, RequestState
from sao_core.statistics import Interval
from sao_core.trajectory import Purpose

PLAIN_EVERY_S = 5.0
"""Without a terminal progress is a line this often."""
_ENDED = (RequestState.DONE, RequestState.EXHAUSTED, RequestState.CANCELLED)


def rollouts_done(ledger: Ledger, run_id: str) -> tuple[int, int]:
    """How many rollouts of an evaluation that stands alone are through, of how many; (0, 0) before they are issued."""
    states = ledger.request_states(run_id, Purpose.EVALUATE)
    return sum(states.get(state, 0) for state in _ENDED), sum(states.values())


class EvaluationProgress(Beside):
    """Shows how far an evaluation is while the context lasts: a bar in a terminal, a line now and then elsewhere."""

    def __init__(self, ledger: Ledger, run_id: str, console: Console) -> None:
        super().__init__(ledger, run_id)
        self._console = console

    def _show(self) -> None:
        if not self._console.is_terminal:
            return self._lines()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True
        ) as bar:
            task = bar.add_task("starting", total=None)
            while not self._done.wait(REFRESH_S):
                done, total = self._read()
                bar.update(task, description="rollouts" if total else "starting", completed=done, total=total or None)
        return None

    def _lines(self) -> None:
        said, said_at = "", time.monotonic()
        while not self._done.wait(REFRESH_S):
            done, total = self._read()
            line, now = f"rollout {done} of {total}" if total else "starting", time.monotonic()
            if line != said and now - said_at >= PLAIN_EVERY_S:
                self._console.print(line, highlight=False, markup=False)
                said, said_at = line, now

    def _read(self) -> tuple[int, int]:
        return rollouts_done(self._ledger, self._run_id) if self._ledger.has_run(self._run_id) else (0, 0)


def evaluation_json(run_id: str, evaluation: EvaluationRecord) -> dict[str, Any]:
    """A result for programs: what was evaluated, how, and every figure by its short name."""
    metrics = short_metrics(evaluation)
    return {
        "run_id": run_id,
        "step": evaluation.step,
        "suite": evaluation.suite,
        "policy_sha256": evaluation.policy_sha256,
        "settings": dict(evaluation.settings),
        "metrics": {name: value for name, value in metrics.items() if not _is_end(name, metrics)},
        "intervals": {
            name: [interval.low, interval.high]
            for name in metrics
            if (interval := interval_of(metrics, name)) is not None
        },
    }


def print_evaluation(run_id: str, evaluation: EvaluationRecord, console: Console) -> None:
    """A result for people."""
    metrics, settings = short_metrics(evaluation), evaluation.settings
    samples = settings.get("samples_per_prompt", 1)
    table = Table("", "value", "95 % interval", title=escape(f"{evaluation.suite}: {settings.get('target', run_id)}"))
    for label, name, form in _rows(metrics, samples):
        interval = interval_of(metrics, name)
        ends = "" if interval is None else _ends(interval, form)
        table.add_row(escape(label), form.format(metrics[name]), ends)
    console.print(table)
    console.print(how(evaluation), highlight=False, markup=False, soft_wrap=True)


def print_answers(ledger: Ledger, run_id: str, evaluation: EvaluationRecord, console: Console) -> None:
    """Where a look is worth it: the best, the worst and a typical sampled answer."""
    notable = ledger.notable_rollouts(run_id, evaluation.version, 1)
    found = {"best": notable.best[:1], "typical": (notable.typical,) if notable.typical else (), "worst": notable.worst}
    for label, rows in found.items():
        for row in rows:
            text = f"{label:<8} reward {row.score:g}: sao trajectory {row.trajectory_id}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def how(evaluation: EvaluationRecord) -> str:
    """What a result was made with, in a line or two."""
    s = evaluation.settings
    if not s:
        return f"weights {evaluation.policy_sha256[:12]} · made by an earlier version, which recorded no settings"
    version = s["environment_version"] or "unknown"
    code = s["code"]
    commit = f" ({code['commit'][:10]}{', changed' if code['dirty'] == 'true' else ''})" if code["commit"] else ""
    sampling = f"temperature {s['temperature']:g}, top-p {s['top_p']:g}, top-k {s['top_k'] or 'off'}, seed {s['seed']}"
    asked = f"{s['prompts']} prompts × {s['samples_per_prompt']} samples{' and greedy' if s['greedy'] else ''}"
    return (
        f"{asked} · {sampling}\n"
        f"{s['environment']} version {version} · weights sha256 {evaluation.policy_sha256} · "
        f"sao-pipeline {code['version']}{commit}"
    )


def print_comparison(comparison: EvaluationComparison, console: Console) -> None:
    """Two models for people."""
    table = Table(
        "", "evaluation", "of", "reward", "95 % interval", title=escape(f"{comparison.suite}: the same prompts")
    )
    for label, side in (("A", comparison.first), ("B", comparison.second)):
        ends = "" if side.interval is None else _ends(side.interval, "{:.3f}")
        table.add_row(label, escape(side.label), escape(side.target), f"{side.mean:.3f}", ends)
    console.print(table)
    console.print(verdict(comparison), highlight=False, markup=False, soft_wrap=True)


def verdict(comparison: EvaluationComparison) -> str:
    """The difference, how sure it is, and what was left out."""
    test = comparison.test
    ends = "" if test.interval is None else f" (95 %: {test.interval.low:+.3f} … {test.interval.high:+.3f})"
    which = "all sign flips" if test.exact else "sampled sign flips"
    text = (
        f"A − B = {test.difference:+.3f}{ends}, p = {test.p_value:.4g} "
        f"(two-sided paired permutation test over {test.prompts} prompts, {which})"
    )
    missing = [
        f"{_lacks(side)} in {name}"
        for name, side in (("A", comparison.first), ("B", comparison.second))
        if side.missing
    ]
    return f"{text}\nleft out, for want of an answer: {', '.join(missing)}" if missing else text


def short_metrics(evaluation: EvaluationRecord) -> dict[str, float]:
    """The figures by what comes after ``eval/SUITE/``."""
    prefix = f"eval/{evaluation.suite}/"
    return {name.removeprefix(prefix): value for name, value in evaluation.metrics.items() if name.startswith(prefix)}


def _lacks(side: Side) -> str:
    return f"{side.missing} prompt{'s' * (side.missing != 1)}"


def _is_end(name: str, metrics: dict[str, float]) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in metrics for end in ("_low", "_high"))


def _ends(interval: Interval, form: str) -> str:
    return f"{form.format(interval.low)} … {form.format(interval.high)}"


def _rows(metrics: dict[str, float], samples: int) -> list[tuple[str, str, str]]:
    """Label, metric and format of what is shown, as far as it is there."""
    at_k = sorted((n for n in metrics if n.startswith("pass_at_") and not _is_end(n, metrics)), key=_k)
    parts = sorted({n.split("/")[0] for n in metrics if n.startswith("difficulty_")})
    rows = [
        (f"reward (avg@{samples})" if samples > 1 else "reward", "reward_mean", "{:.3f}"),
        ("greedy reward", "greedy_reward_mean", "{:.3f}"),
        *((f"pass@{_k(name)}", name, "{:.3f}") for name in at_k),
        *((f"reward, difficulty {p.removeprefix('difficulty_')}", f"{p}/reward_mean", "{:.3f}") for p in parts),
        ("truncated", "truncated", "{:.1%}"),
        ("tokens per rollout", "tokens", "{:.1f}"),
        ("turns per rollout", "turns", "{:.1f}"),
        ("seconds per rollout", "rollout_s", "{:.2f}"),
        ("missing rollouts", "missing_rollouts", "{:.0f}"),
    ]
    return [row for row in rows if row[1] in metrics]


def _k(name: str) -> int:
    return int(name.removeprefix("pass_at_"))
