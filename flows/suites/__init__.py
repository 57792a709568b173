"""Suites: what a model is evaluated on and how. YAML files of :class:`Suite`, or any JSON Lines file of questions.

A suite says all that decides what an answer is worth, so models that were given the same one can be compared. It never
says what the machine can bear (slots, devices): that is for `--set rollout.slots=…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from flows.recipes import scalar
from sao_core.config import (
    ConfigError,
    RolloutConfig,
    Section,
    TrainConfig,
    explain,
    nearest,
    parse_config,
    setting_names,
)
from sao_core.jsonl_rows import read_rows

SECTIONS = ("model", "rollout", "tracking", "asynchrony")
"""Of :class:`TrainConfig`, what an evaluation may be told beside its suite."""


class SuiteEnvironment(Section):
    """The tasks."""

    name: str = Field(description="An environment, as in `environment.name` of a recipe.")
    options: dict[str, Any] = Field(default_factory=dict, description="The environment's own settings.")


class SuiteLimits(Section):
    """What an answer may cost; see the settings of these names in `rollout`."""

    max_turns: int = Field(RolloutConfig().max_turns, ge=1, description="Turns of the policy per rollout.")
    max_action_tokens: int = Field(RolloutConfig().max_action_tokens, ge=1, description="Tokens sampled per rollout.")
    max_context_tokens: int = Field(RolloutConfig().max_context_tokens, ge=8, description="Of prompt and all turns.")
    step_timeout_s: float = Field(RolloutConfig().step_timeout_s, gt=0, description="Longest environment step.")
    rollout_timeout_s: float = Field(RolloutConfig().rollout_timeout_s, gt=0, description="Longest rollout.")


class Suite(Section):
    """An evaluation but for its model."""

    name: str = Field(description="What it is called in metrics; a file's name if it says nothing else.")
    environment: SuiteEnvironment = Field(description="The tasks.")
    every_row: bool = Field(
        False,
        description="Ask every row of `environment.options.path`, instead of those held out of it: for a file that "
        "nothing trains on.",
    )
    prompts: int = Field(128, ge=1, description="Held-out prompts, at most.")
    samples: int = Field(1, ge=1, description="Sampled rollouts per prompt: the k of avg@k.")
    temperature: float = Field(1.0, gt=0, description="Of the sampled rollouts.")
    top_p: float = Field(1.0, gt=0, le=1, description="Share of the likeliest tokens drawn from.")
    top_k: int = Field(0, ge=0, description="How many of the likeliest tokens are drawn from; 0: all.")
    greedy: bool = Field(False, description="Answer each prompt greedily as well.")
    seed: int = Field(0, ge=0, description="Of the prompts and of the sampling.")
    limits: SuiteLimits = Field(default_factory=SuiteLimits, description="What an answer may cost.")

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not value.strip() or any(c in value for c in '/\\"\n\0'):
            raise ValueError(f"must be a plain name without slashes: got {value!r}")
        return value


def suite_names() -> list[str]:
    """The suites that ship with the package."""
    return sorted(f.name.removesuffix(".yaml") for f in files(__name__).iterdir() if f.name.endswith(".yaml"))


def suite_summary(name: str) -> str:
    """The first comment line of a shipped suite."""
    return files(__name__).joinpath(f"{name}.yaml").read_text().splitlines()[0].lstrip("# ").strip()


def load_suite(suite: str, changes: Mapping[str, Any] | None = None) -> Suite:
    """A shipped suite, a YAML file of one, or the questions of a JSON Lines file; with ``changes`` by dotted name.

    Raises:
        ConfigError: there is no such suite, or its file names what there is not; one line with file, line and field.
    """
    if suite.endswith(".jsonl"):
        values, where, text = _jsonl_suite(Path(suite)), suite, ""
    elif suite.endswith((".yaml", ".yml")):
        path = Path(suite).expanduser()
        if not path.is_file():
            raise ConfigError(f"no such suite file: {suite}; `sao suites` lists the shipped ones")
        text, where = path.read_text(), suite
        values = {"name": path.stem, **_mapping(text, where)}
    else:
        if suite not in suite_names():
            raise ConfigError(
                f"unknown suite `{suite}`{nearest(suite, suite_names())} (your own: a .jsonl or .yaml file)"
            )
        text, where = files(__name__).joinpath(f"{suite}.yaml").read_text(), f"suite {suite}"
        values = {"name": suite, **_mapping(text, where)}
    parsed = _parse(values, where, text)
    return parsed if not changes else _parse(_changed(parsed.model_dump(), changes), "", "")


def split_settings(overrides: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``KEY=VALUE`` texts → (changes of the suite, settings of the machine), both by dotted name.

    Raises:
        ConfigError: neither has such a setting; the message says the nearest.
    """
    own, beside = set(setting_names(Suite)) - {"name"}, set(_machine_settings())
    suite: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set needs KEY=VALUE: got {override!r}")
        if key.startswith("environment.options.") or key in own:
            suite[key] = scalar(text)
        elif key in beside:
            machine[key] = scalar(text)
        else:
            last = key.removeprefix("rollout.")
            meant = next((name for name in (f"limits.{last}", last) if name in own), None)
            hint = f"; did you mean `{meant}`?" if meant else nearest(key, sorted(own | beside))
            raise ConfigError(f"an evaluation has no setting `{key}`{hint}")
    return suite, machine


def evaluation_config(
    suite: Suite, model: str, machine: Mapping[str, Any] | None = None, like: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The run that evaluates ``model`` (a `model.path`) on a suite.

    ``machine``: settings by dotted name; ``like``: the configuration of the run that the model comes from, whose
    precision and slots are taken.
    """
    before = like or {}
    values: dict[str, Any] = {
        "recipe": f"evaluate-{suite.name}",
        "seed": suite.seed,
        "model": {**before.get("model", {}), "path": model},
        "environment": {"name": suite.environment.name, "options": _options(suite)},
        "rollout": {**_resources(before.get("rollout", {})), **suite.limits.model_dump()},
        "evaluation": {
            "every": 0,
            "prompts": suite.prompts,
            "samples_per_prompt": suite.samples,
            "greedy": suite.greedy,
            "temperature": suite.temperature,
            "top_p": suite.top_p,
            "top_k": suite.top_k,
            "suite": suite.name,
            "alone": True,
        },
    }
    try:
        return parse_config(_changed(values, machine or {}))
    except ConfigError as error:
        raise ConfigError(
            re.sub(rf"\brollout\.(?={'|'.join(SuiteLimits.model_fields)})", "limits.", str(error))
        ) from None


def suite_of_run(config: TrainConfig, changes: Mapping[str, Any] | None = None) -> Suite:
    """The held-out tasks that a run is evaluated on while it trains, with ``changes`` by dotted name."""
    own = config.evaluation
    suite = Suite(
        name=config.suite,
        environment=SuiteEnvironment(name=config.environment.name, options=dict(config.environment.options)),
        prompts=own.prompts,
        samples=own.samples_per_prompt,
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        greedy=own.greedy,
        seed=config.seed,
        limits=SuiteLimits(**{name: getattr(config.rollout, name) for name in SuiteLimits.model_fields}),
    )
    return suite if not changes else _parse(_changed(suite.model_dump(), changes), "", "")


def _jsonl_suite(path: Path) -> dict[str, Any]:
    """Every row of the file is held out, and asked."""
    rows = sum(1 for _ in read_rows(path, "--suite"))
    if not rows:
        raise ConfigError(f"--suite {path} has no rows")
    place = str(path.expanduser().absolute())
    environment = {"name": "jsonl", "options": {"path": place}}
    return {"name": path.stem, "environment": environment, "every_row": True, "prompts": rows}


def _options(suite: Suite) -> dict[str, Any]:
    options = dict(suite.environment.options)
    if suite.every_row and "path" not in options:
        raise ConfigError(f"suite {suite.name} asks every row of a file: name it, --set environment.options.path=FILE")
    return {"evaluation_path": options["path"], **options} if suite.every_row else options


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must hold a mapping of settings: got {type(values).__name__}")
    return values


def _parse(values: Mapping[str, Any], where: str, text: str) -> Suite:
    try:
        return Suite.model_validate(values)
    except ValidationError as error:
        line = _line(text, error.errors()[0]["loc"])
        place = "" if not where else f"{where}: " if line is None else f"{where}:{line}: "
        raise ConfigError(f"{place}{explain(error, Suite)}") from None


def _line(text: str, place: tuple[int | str, ...]) -> int | None:
    """The line of the deepest part of ``place`` that the text has; None if it has none."""
    node, line = yaml.compose(text) if text else None, None
    for part in place:
        if not isinstance(node, yaml.MappingNode):
            break
        found = [(key, value) for key, value in node.value if key.value == str(part)]
        if not found:
            break
        key, node = found[0]
        line = key.start_mark.line + 1
    return line


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with values put at dotted names."""
    changed = dict(values)
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = changed
        for section in sections:
            target[section] = dict(target.get(section) or {})
            target = target[section]
        target[last] = value
    return changed


def _machine_settings() -> list[str]:
    own = {"model.path", *(f"rollout.{name}" for name in (*SuiteLimits.model_fields, "temperature", "top_p", "top_k"))}
    return [name for name in setting_names(TrainConfig) if name.partition(".")[0] in SECTIONS and name not in own]


def _resources(rollout: Mapping[str, Any]) -> dict[str, Any]:
    taken = (
        "workers",
        "slots",
        "threads",
        "device",
        "on_swap",
        "max_attempts",
        "restarts",
        "lease_s",
        "partial_after_s",
    )
    return {name: rollout[name] for name in taken if name in rollout}
