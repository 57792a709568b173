"""Whose weights `sao evaluate` means: a run's checkpoint, a folder, `tiny`, a registered model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from evaluated_runs import Bench, config
from tracked_run import TrackedRun

from infra.evaluated_model import model_sha256, publish_model
from infra.ledger import Ledger
from infra.manifest import MANIFEST
from infra.objects import ObjectStore
from infra.policy_store import PolicyStore
from infra.settings import Settings
from infra.targets import model_path, resolve_target
from sao_core.config import ConfigError


@pytest.fixture
def home(tmp_path: Path, migrated_sqlite: Path) -> Settings:
    settings = Settings.from_environment({"SAO_HOME": str(tmp_path / "home")}, tmp_path)
    settings.home.mkdir()
    shutil.copy(migrated_sqlite, settings.home / "ledger.db")
    return settings


@pytest.fixture
def ledger(home: Settings) -> Ledger:
    return Ledger(home.database_url)


def folder(place: Path, weights: str) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_text(weights)
    return place


def policies(home: Settings, ledger: Ledger) -> PolicyStore:
    return PolicyStore(ObjectStore.from_settings(home), ledger, home.cache)


def trained(home: Settings) -> TrackedRun:
    """A run with checkpoints of steps 2 and 4; that of step 2 is called best."""
    made = TrackedRun(home, "tiny-1")
    made.steps(1, 2)
    made.checkpoint(2)
    made.ledger.name_checkpoint(made.run_id, 2, "best")
    made.steps(3, 4)
    made.checkpoint(4)
    made.complete()
    return made


@pytest.mark.parametrize(
    ("checkpoint", "step"), [(None, 4), ("best", 2), ("2", 2)], ids=["newest", "by name", "by step"]
)
def test_a_run_means_the_policy_of_a_checkpoint(
    home: Settings, ledger: Ledger, checkpoint: str | None, step: int
) -> None:
    path = model_path(trained(home).run_id, ledger, checkpoint)
    assert path == f"run:tiny-1@{step}"
    (policy,) = [policy for policy in ledger.policies("tiny-1") if policy.step == step]
    assert resolve_target(path, home) == str(policies(home, ledger).fetch("tiny-1", policy.version))


def test_other_targets_are_what_they_say(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "mine", "")
    assert model_path("mine", ledger) == str(tmp_path / "mine")
    assert [model_path(name, ledger) for name in ("tiny", "models:/tiny@champion")] == ["tiny", "models:/tiny@champion"]


@pytest.mark.parametrize(
    ("target", "checkpoint", "message"),
    [
        (
            "tiny-2",
            None,
            "neither a run, a model folder, `tiny` nor models:/NAME@champion; did you mean the run `tiny-1`?",
        ),
        ("tiny", "best", "--checkpoint is for runs only"),
        ("tiny-1", "worst", "has no checkpoint `worst`; there are: 4, 2 (best)"),
        ("begun", None, "run begun has no checkpoint yet: train it further"),
    ],
    ids=["a name that is nearly a run's", "a checkpoint of no run", "no such checkpoint", "a run that has none yet"],
)
def test_what_cannot_be_meant_is_told_in_a_line(
    home: Settings, ledger: Ledger, target: str, checkpoint: str | None, message: str
) -> None:
    trained(home)
    ledger.create_run("begun", "tiny", "sao", {"recipe": "tiny"})
    with pytest.raises(ConfigError) as refused:
        model_path(target, ledger, checkpoint)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [("run:tiny-1", "must be run:RUN@STEP"), ("run:nobody@3", "there is no run nobody")],
    ids=["without a step", "of no run"],
)
def test_a_path_to_a_run_that_is_wrong_is_told(home: Settings, ledger: Ledger, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_target(path, home, ledger)


def test_an_evaluation_means_what_it_evaluated(tmp_path: Path, migrated_sqlite: Path) -> None:
    bench = Bench(tmp_path / "bench", migrated_sqlite)
    bench.ask("e", config())
    assert model_path("e", bench.ledger) == "run:e@0"


def test_the_same_weights_have_the_same_sha256_wherever_they_come_from(
    home: Settings, ledger: Ledger, tmp_path: Path
) -> None:
    run = trained(home).run_id
    stored = Path(resolve_target(f"run:{run}@4", home, ledger))
    assert (stored / MANIFEST).exists()
    exported = shutil.copytree(stored, tmp_path / "exported")
    folder(exported / "critic", "a critic")
    (exported / "old.bin").touch()
    published = []
    for number, source in enumerate((stored, exported)):
        ledger.create_run(f"e-{number}", "evaluate", "sao", {"recipe": "evaluate"})
        attempt = ledger.begin_attempt(f"e-{number}")
        publish_model(ledger, policies(home, ledger), f"e-{number}", attempt, str(source), 0, home.scratch)
        published.append(ledger.policy(f"e-{number}", 0))
    assert {policy.sha256 for policy in published} == {ledger.policies(run)[-1].sha256}
    assert {model_sha256(source) for source in (stored, exported)} == {published[0].sha256}
    assert not (home.scratch / "e-0").exists()


def test_a_resumed_evaluation_goes_on_with_the_weights_that_it_began_with(
    home: Settings, ledger: Ledger, tmp_path: Path
) -> None:
    source = folder(tmp_path / "model", "first")
    ledger.create_run("e", "evaluate", "sao", {"recipe": "evaluate"})
    first = ledger.begin_attempt("e")
    publish_model(ledger, policies(home, ledger), "e", first, str(source), 0, home.scratch)
    (source / "model.safetensors").write_text("trained on")
    second = ledger.begin_attempt("e")
    assert ledger.newest_policy("e", announced=True) is None
    for _ in range(2):  # a restarted process comes here again
        publish_model(ledger, policies(home, ledger), "e", second, str(source), 0, home.scratch)
    announced = ledger.newest_policy("e", announced=True)
    assert announced is not None
    assert (Path(policies(home, ledger).fetch("e", 0)) / "model.safetensors").read_text() == "first"
    assert len(ledger.policies("e")) == 1
