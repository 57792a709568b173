"""How a run goes, on one page: reward, explained variance, staleness, and what the band rejects.

A PNG for reports, and an HTML file that needs nothing else. The same numbers give the same bytes. Nothing here knows
MLflow, and matplotlib is used without its global state of figures.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.ledger import EvaluationRecord, UpdateRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DOTS = 400
"""More updates than this are averaged in groups, so that a chart of a long run is as small as one of a short run."""

SMOOTHED_OVER = 0.05
"""The line averages over about this share of the run."""

_DOTS, _LINE, _SAMPLED, _GREEDY, _GRID = "#9db8d2", "#1f5f99", "#c2410c", "#0f766e", "#e5e7eb"
_TEXT = "#1f2937"


@dataclass(frozen=True)
class _Panel:
    metric: str
    title: str
    unit: str
    floor: float = -math.inf
    """Lower values are cut off, and the axis says so."""
    from_zero: bool = False


_PANELS = (
    _Panel("reward/mean", "Reward", "mean of the batch"),
    _Panel("value/explained_variance", "Explained variance", "of the returns, by the critic", floor=-1.0),
    _Panel("staleness/mean", "Staleness", "age of a token, in updates", from_zero=True),
    _Panel("policy/band_rejected", "Rejected by the band", "share of tokens", from_zero=True),
)
METRICS = tuple(panel.metric for panel in _PANELS)
"""The metrics of updates that are shown."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; margin: 1.5rem auto; max-width: 60rem;
  padding: 0 1rem }}
h1 {{ font-size: 1.2rem; overflow-wrap: anywhere }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid #e5e7eb }}
td + td {{ text-align: right }}
</style></head>
<body><h1>{title}</h1>
{svg}
<table><tr><th>last values</th><th>value</th><th>update</th></tr>
{rows}</table>
</body></html>
"""


def chart_png(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRecord], title: str) -> bytes:
    """The four charts of a run as a PNG."""
    sink = io.BytesIO()
    _figure(updates, evaluations, title).savefig(sink, format="png", metadata={"Software": None})
    return sink.getvalue()


def chart_html(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRecord], title: str) -> str:
    """The four charts and a table of the last values as one HTML page; it loads nothing and runs nothing."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{value:.4g}</td><td>{step}</td></tr>\n"
        for name, value, step in _last_values(updates, evaluations)
    )
    svg = _svg(_figure(updates, evaluations, None))
    return _PAGE.format(title=html.escape(title), svg=svg, rows=rows)


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    sink = io.StringIO()
    with rc_context({"svg.hashsalt": "sao", "svg.fonttype": "none"}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = sink.getvalue()
    return text[text.index("<svg") :]


def _figure(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRecord], title: str | None) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.8), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2)
    top = 0.95 if title is None else 0.88
    figure.subplots_adjust(left=0.075, right=0.985, bottom=0.085, top=top, hspace=0.42, wspace=0.18)
    if title is not None:
        figure.suptitle(title, x=0.075, y=0.975, ha="left", fontsize=11, color=_TEXT, parse_math=False)
    for axes, panel in zip(grid.flat, _PANELS, strict=True):
        _draw(axes, panel, updates)
    _mark_evaluations(grid.flat[0], evaluations)
    return figure


def _draw(axes: Axes, panel: _Panel, updates: Sequence[UpdateRow]) -> None:
    steps, values = _series(panel.metric, updates)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=_TEXT)
    axes.set_ylabel(panel.unit, fontsize=8, color=_TEXT)
    axes.set_xlabel("update", fontsize=8, color=_TEXT)
    axes.tick_params(labelsize=8, color=_GRID, labelcolor=_TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", nbins=8, integer=True)
    axes.locator_params(axis="y", nbins=5)
    if not steps:
        axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", fontsize=9, color="#6b7280")
        return
    group = math.ceil(len(steps) / MAX_DOTS)
    each = "one update" if group == 1 else f"mean of {group} updates"
    axes.plot(*_thinned(steps, values, group), ".", color=_DOTS, markersize=4, label=each)
    axes.plot(*_thinned(steps, _smoothed(values), group), color=_LINE, linewidth=1.6, label="smoothed")
    if panel.from_zero:
        axes.set_ylim(bottom=0.0)
    if min(values) < panel.floor:
        axes.set_ylim(bottom=panel.floor)
        axes.set_ylabel(f"{panel.unit} (cut at {panel.floor:g})", fontsize=8, color=_TEXT)


def _mark_evaluations(axes: Axes, evaluations: Sequence[EvaluationRecord]) -> None:
    """Held-out rewards; of several results of a step (a rewind made it again) the last."""
    for name, marker, colour, text in (
        ("reward_mean", "o", _SAMPLED, "held out, sampled"),
        ("greedy_reward_mean", "D", _GREEDY, "held out, greedy"),
    ):
        found = {e.step: e.metrics.get(f"eval/{e.suite}/{name}") for e in evaluations}
        rewards = {step: value for step, value in sorted(found.items()) if value is not None}
        if rewards:
            axes.plot(list(rewards), list(rewards.values()), marker, color=colour, markersize=5, label=text)
    if axes.lines:
        axes.legend(fontsize=7, frameon=False, loc="best", ncols=2, labelcolor=_TEXT)


def _series(metric: str, updates: Sequence[UpdateRow]) -> tuple[list[int], list[float]]:
    """Steps and values where the metric is a number."""
    found = [(u.step, float(u.metrics[metric])) for u in updates if _is_number(u.metrics.get(metric))]
    return [step for step, _ in found], [value for _, value in found]


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _smoothed(values: Sequence[float]) -> list[float]:
    """An exponential mean over about a twentieth of the run (five updates at least), unbiased at its start."""
    keep = 1.0 - 1.0 / max(5.0, SMOOTHED_OVER * len(values))
    total = weight = 0.0
    smooth: list[float] = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1.0
        smooth.append(total / weight)
    return smooth


def _thinned(steps: Sequence[int], values: Sequence[float], group: int) -> tuple[list[float], list[float]]:
    """Means of ``group`` neighbours."""
    starts = range(0, len(steps), group)
    return [_mean(steps[i : i + group]) for i in starts], [_mean(values[i : i + group]) for i in starts]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _last_values(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRecord]) -> list[tuple[str, float, int]]:
    """Name, value and step of what is shown, as it stood last."""
    last: dict[str, tuple[float, int]] = {}
    for metric in METRICS:
        steps, values = _series(metric, updates)
        if steps:
            last[metric] = values[-1], steps[-1]
    for evaluation in evaluations:
        for name in ("reward_mean", "greedy_reward_mean"):
            key = f"eval/{evaluation.suite}/{name}"
            if _is_number(evaluation.metrics.get(key)):
                last[key] = evaluation.metrics[key], evaluation.step
    return [(name, value, step) for name, (value, step) in last.items()]
