"""Patches of an evaluation as SWE-bench predictions, for the official harness to score elsewhere.

`swebench.harness.run_evaluation --predictions_path FILE.jsonl` reads one JSON object a line with ``instance_id``,
``model_name_or_path`` and ``model_patch``, one line per instance; it counts an empty patch as unresolved.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.evaluation_comparison import Evaluated
from infra.ledger import Ledger, TrajectoryRow
from infra.trajectory_store import TrajectoryStore
from sao_core.config import ConfigError

PATCH, INSTANCE = "patch", "instance_id"
"""What environments leave in ``StepResult.info``; without an instance's id the prompt's key stands for it."""
_ROLLOUTS_AT_ONCE = 64


@dataclass(frozen=True)
class Written:
    """What a predictions file holds."""

    rows: int
    empty: int
    """Of these, rows without a patch: the rollout was cut before the environment could leave one."""
    missing: int
    """Prompts that have no such sample."""


def check_predictions_file(path: Path) -> None:
    """Raise :class:`ConfigError` unless predictions can go there and the harness will take the file for what it is."""
    if path.suffix != ".jsonl":
        raise ConfigError(
            f"the file of predictions must end in .jsonl, by which the harness knows its form: got {path}"
        )
    if path.exists():
        raise ConfigError(f"{path} exists: remove it, or name another file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.absolute().parent} for {path.name}: make it first")


def write_predictions(
    ledger: Ledger,
    store: TrajectoryStore,
    evaluation: Evaluated,
    path: Path,
    *,
    sample: int = 1,
    say: Callable[[int, int], object] = lambda done, total: None,
) -> Written:
    """Write the ``sample``-th sampled answer (1, 2, …) of every prompt; the file is complete or absent.

    ``say`` is told how many of all answers are read.

    Raises:
        ConfigError: none of the answers left a patch, or no prompt has so many samples, or the file is there.
        CorruptObject: an answer is not what was recorded.
    """
    check_predictions_file(path)
    chosen = _chosen(ledger, evaluation, sample)
    draft = path.with_name(f".{path.name}.partial")
    model, rows, with_patch, found = _model_name(evaluation), 0, 0, False
    try:
        with draft.open("w", encoding="utf-8") as file:
            for instance, patch, has_one in _patches(store, chosen, say):
                row = {"instance_id": instance, "model_name_or_path": model, "model_patch": patch}
                file.write(json.dumps(row) + "\n")
                rows, with_patch, found = rows + 1, with_patch + bool(patch), found or has_one
            file.flush()
            os.fsync(file.fileno())
        if not found:
            environment = evaluation.record.settings.get("environment", "its environment")
            raise ConfigError(
                f"no answer of {evaluation.label} has a patch: `{environment}` leaves none in info[{PATCH!r}], as "
                "`code_repair` does"
            )
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return Written(rows, rows - with_patch, evaluation.record.settings.get("prompts", rows) - rows)


def _chosen(ledger: Ledger, evaluation: Evaluated, sample: int) -> list[TrajectoryRow]:
    """The first segment of the chosen sample of each prompt, in the order in which they were asked."""
    samples: dict[str, list[TrajectoryRow]] = defaultdict(list)
    for row in ledger.evaluation_rows(evaluation.run_id, evaluation.record.version):
        if row.segment == 0 and not row.greedy:
            samples[row.prompt_key].append(row)
    most = max((len(rows) for rows in samples.values()), default=0)
    if not 1 <= sample <= most:
        raise ConfigError(f"--sample must lie between 1 and the {most} samples of {evaluation.label}: got {sample}")
    return [rows[sample - 1] for rows in samples.values() if len(rows) >= sample]


def _patches(
    store: TrajectoryStore, rows: list[TrajectoryRow], say: Callable[[int, int], object]
) -> Iterator[tuple[str, str, bool]]:
    """Instance, patch, and whether the environment left one."""
    for start in range(0, len(rows), _ROLLOUTS_AT_ONCE):
        some = rows[start : start + _ROLLOUTS_AT_ONCE]
        for trajectory, *_ in store.read(some):
            info = trajectory.info
            yield str(info.get(INSTANCE, trajectory.prompt_key)), str(info.get(PATCH, "")), PATCH in info
        say(start + len(some), len(rows))


def _model_name(evaluation: Evaluated) -> str:
    """A name that the harness can make a folder of."""
    target = str(evaluation.record.settings.get("target", evaluation.label))
    return f"{re.sub(r'[^A-Za-z0-9._@-]+', '-', target).strip('-')}-{evaluation.record.policy_sha256[:12]}"
