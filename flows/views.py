"""What `sao runs` and `sao show` say of a run, for people and as JSON; read from the ledger alone."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from flows.display import duration, evaluation_table, links, sparkline
from flows.evaluation_view import print_answers, print_evaluation
from infra.ledger import Ledger, RunRecord, UpdateRow
from infra.settings import Settings
from sao_core.changes import Change

TIME_PARTS = {
    "waiting for rollouts": "time/learner_wait_s",
    "value updates": "time/value_s",
    "policy update": "time/policy_s",
    "ledger and storage": "time/store_s",
    "orchestration (Prefect, flow)": "time/orchestration_s",
}


def run_summary(ledger: Ledger, places: Settings, run: RunRecord) -> dict[str, Any]:
    """A run as JSON: identity, status, step, last value of every metric, links."""
    metrics: dict[str, float] = {}
    for stage in ledger.stage_metrics(run.run_id).values():
        metrics |= stage
    if last := ledger.last_update(run.run_id):
        metrics |= last.metrics
    evaluations = ledger.evaluations(run.run_id)
    for evaluation in evaluations:
        metrics |= evaluation.metrics
    return {
        "run_id": run.run_id,
        "kind": "evaluation" if is_evaluation(run) else "training",
        "recipe": run.recipe,
        "algorithm": run.algorithm,
        "environment": run.config["environment"]["name"],
        "model": run.config["model"]["path"],
        "suite": suite_of(run),
        "seed": run.config["seed"],
        "status": str(run.status),
        "message": run.message,
        "step": run.step,
        "created_at": datetime.fromtimestamp(run.created_at, UTC).isoformat(timespec="seconds"),
        "metrics": metrics,
        "evaluations": [{"step": e.step, "version": e.version, **e.metrics} for e in evaluations],
        "mlflow_run_id": run.mlflow_run_id,
        "prefect_flow_run_id": run.prefect_flow_run_id,
        "objects": f"{places.object_store}/runs/{run.run_id}",
    }


def is_evaluation(run: RunRecord) -> bool:
    """Whether the run evaluates a model and trains nothing."""
    return bool(run.config.get("evaluation", {}).get("alone"))


def go_on(run: RunRecord) -> str:
    """The command that goes on with a run, without `sao`."""
    return f"{'evaluate' if is_evaluation(run) else 'train'} --resume {run.run_id}"


def suite_of(run: RunRecord) -> str:
    """What its evaluations are called in metrics."""
    return run.config.get("evaluation", {}).get("suite") or run.config["environment"]["name"]


def checkpoint_summaries(ledger: Ledger, places: Settings, run_id: str) -> list[dict[str, Any]]:
    """A run's complete checkpoints as JSON, newest first."""
    ledger.run(run_id)
    return [
        {
            "step": record.step,
            "name": record.name,
            "created_at": datetime.fromtimestamp(record.created_at, UTC).isoformat(timespec="seconds"),
            "objects": f"{places.object_store}/{record.object_key}",
            "manifest_sha256": record.sha256,
        }
        for record in ledger.checkpoints(run_id)
    ]


def print_checkpoints(summaries: list[dict[str, Any]], console: Console) -> None:
    """Checkpoints for people."""
    table = Table("step", "name", "stored at", Column("where", overflow="fold"))
    for summary in summaries:
        table.add_row(str(summary["step"]), summary["name"] or "–", summary["created_at"], summary["objects"])
    console.print(table)


def print_run(ledger: Ledger, places: Settings, run: RunRecord, console: Console) -> None:
    """A run for people: how it stands, how it went, where the time goes, its settings and links."""
    updates = ledger.updates_since(run.run_id, 0)
    total = run.config["learner"]["updates"]
    at = f"evaluation of {run.config['model']['path']}" if is_evaluation(run) else f"update {run.step} of {total}"
    console.print(f"[bold]{run.run_id}[/bold]  {run.status}  ·  {escape(at)}", highlight=False)
    if run.message:
        console.print(run.message, markup=False, highlight=False)
    if updates:
        rewards = [u.metrics["reward/mean"] for u in updates]
        console.print(f"reward  {rewards[0]:.3f} {sparkline(rewards[:: max(1, len(rewards) // 60)])} {rewards[-1]:.3f}")
        console.print(_metrics_table(updates))
        console.print(_time_table(updates))
        console.print(_lengths_line(ledger, run.run_id), highlight=False)
    evaluations = ledger.evaluations(run.run_id)
    if evaluations and is_evaluation(run):
        print_evaluation(run.run_id, evaluations[-1], console)
        print_answers(ledger, run.run_id, evaluations[-1], console)
    elif evaluations:
        console.print(evaluation_table(evaluations))
    for what, purposes in ledger.counts(run.run_id).items():
        for purpose, states in purposes.items():
            numbers = ", ".join(f"{n} {state}" for state, n in states.items())
            console.print(f"{what} for {purpose}: {numbers}", highlight=False, markup=False)
    for change in ledger.config_changes(run.run_id):
        shown = Change(change.setting, change.old, change.new)
        console.print(f"changed on resume from step {change.step}: {shown}", highlight=False, markup=False)
    console.print(links(ledger, places, run.run_id), highlight=False, soft_wrap=True)
    console.print(yaml.safe_dump(dict(run.config), sort_keys=False), markup=False, highlight=False)


def _metrics_table(updates: list[UpdateRow]) -> Table:
    table = Table("metric", "first", "last", title="metrics")
    for name in sorted(updates[-1].metrics):
        first, last = updates[0].metrics.get(name), updates[-1].metrics[name]
        table.add_row(name, "–" if first is None else f"{first:.4g}", "–" if last is None else f"{last:.4g}")
    return table


def _time_table(updates: list[UpdateRow]) -> Table:
    """Medians over the updates: where the time of one goes."""
    whole = median(u.metrics["time/step_s"] for u in updates)
    table = Table(
        "part of an update", "median", "share", title=f"where the time goes ({duration(whole * len(updates))} in all)"
    )
    for label, name in TIME_PARTS.items():
        value = median(u.metrics.get(name, 0.0) for u in updates)
        table.add_row(label, f"{value * 1000:.0f} ms", f"{value / whole:.0%}")
    table.add_row("one update", f"{whole * 1000:.0f} ms", "", style="bold")
    return table


def _lengths_line(ledger: Ledger, run_id: str) -> str:
    """Used ÷ issued by length decile: a share that falls to the right says that long rollouts are being lost."""
    from sao_core.diagnostics import used_by_length

    lengths = ledger.lengths(run_id)
    shares = used_by_length([tokens for tokens, _ in lengths], [used for _, used in lengths])
    return "used ÷ settled, shortest tenth to longest:  " + "  ".join("–" if s is None else f"{s:.2f}" for s in shares)
