"""Who may become champion, who may not, the way back, and training from the champion."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from tracked_run import TrackedRun, empty_home, no_charts

from flows.cli import main
from infra.objects import ObjectStore
from infra.settings import Settings
from infra.tracking import TrackingError, send_now
from infra.tracking.comparison import Mean, compare
from infra.tracking.promotion import CHAMPIONS_TAG, PromotionRefused, Rollback, promote, rollback
from infra.tracking.registry import CHAMPION, model_name, resolve_model, versions
from infra.upkeep import Upkeep
from infra.verify import verify
from sao_core.config import ConfigError


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with no_charts():
        yield


def run_of(settings: Settings, run_id: str, *scores: float, **sections: Any) -> TrackedRun:
    """A completed run of one update whose policy has these scores, as MLflow knows it."""
    made = TrackedRun(settings, run_id, **({"tracking": {"traces": 0}} | sections))
    made.steps(1)
    made.checkpoint(1)
    if scores:
        made.evaluate(*scores)
    made.complete()
    send_now(made.ledger, run_id, settings, made.config)
    return made


RUNS = {
    "good": ((1.0, 1.0, 0.5, 0.5), {}),
    "better": ((1.0, 1.0, 0.5, 1.0), {}),
    "worse": ((0.0, 0.5, 0.5, 0.5), {}),
    "other-seed": ((1.0, 1.0, 1.0, 1.0), {"seed": 7}),
    "other-tasks": ((1.0, 1.0, 1.0, 1.0), {"environment": {"options": {"max_operations": 1}}}),
    "unseen": ((), {}),
}
"""Run → the rewards of its last policy, and what is special about it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, new_mlflow: Path, migrated_sqlite: Path) -> Settings:
    """Runs of one recipe; each test begins with a copy of MLflow in which none is champion."""
    settings = empty_home(tmp_path_factory.mktemp("runs"), new_mlflow, migrated_sqlite)
    for run_id, (scores, sections) in RUNS.items():
        run_of(settings, run_id, *scores, **sections).ledger.close()
    return settings


@pytest.fixture
def settings(made: Settings, tmp_path: Path) -> Settings:
    for name in ("mlflow.db", "ledger.db"):
        shutil.copy(made.home / name, tmp_path / name)
    return Settings.from_environment({"SAO_HOME": str(tmp_path), "SAO_OBJECT_STORE": made.object_store}, tmp_path)


@pytest.fixture
def ledger(settings: Settings) -> Any:
    from infra.ledger import Ledger

    return Ledger(settings.database_url)


def champion(settings: Settings) -> str:
    version = MlflowClient(settings.tracking_uri).get_model_version_by_alias("tiny", CHAMPION)
    return str(version.tags["sao.run"])


def test_the_first_champion_needs_an_evaluation_only(settings: Settings, ledger: Any) -> None:
    promotion = promote(ledger, settings, "good")
    assert champion(settings) == "good"
    assert promotion.reward is not None
    assert (promotion.reward.value, promotion.reward.prompts, promotion.before) == (0.75, 4, None)
    assert "good" in str(promotion)
    assert "calculator reward 0.750 (0.291 … 1.209)" in str(promotion)
    again = promote(ledger, settings, "good")
    assert again.version == promotion.version
    assert MlflowClient(settings.tracking_uri).get_registered_model("tiny").tags[CHAMPIONS_TAG] == json.dumps(
        [promotion.version.number]
    )


def test_a_better_one_takes_its_place_and_a_worse_one_does_not(settings: Settings, ledger: Any) -> None:
    promote(ledger, settings, "good")
    better = promote(ledger, settings, "better")
    assert champion(settings) == "better"
    assert better.comparison is not None
    assert better.comparison.paired
    assert (better.comparison.candidate.value, better.comparison.champion.value) == (0.875, 0.75)
    assert better.comparison.difference.value == 0.125
    with pytest.raises(PromotionRefused) as refused:
        promote(ledger, settings, "worse")
    said = str(refused.value)
    assert champion(settings) == "better"
    assert len(said.splitlines()) == 1
    assert "worse than tiny version" in said
    assert "reward 0.375 (-0.023 … 0.773) against the champion's 0.875 (0.477 … 1.273): -0.500 (" in said
    assert "on the same 4 prompts" in said
    assert said.endswith("--force")


def test_what_is_forced_is_said(settings: Settings, ledger: Any) -> None:
    promote(ledger, settings, "good")
    promotion = promote(ledger, settings, "worse", at_least=0.9, force=True)
    assert champion(settings) == "worse"
    assert len(promotion.overridden) == 2
    assert "overridden by --force: it is worse than tiny version" in str(promotion)
    assert "is below --at-least 0.9" in str(promotion)
    assert promote(ledger, settings, "unseen", force=True).reward is None


@pytest.mark.parametrize(
    ("run", "options", "reason"),
    [
        ("unseen", {}, "the policy of step 1 was not evaluated"),
        ("other-tasks", {}, "whose tasks were others"),
        ("better", {"at_least": 0.9}, r"reward 0.875 \(.*\) is below --at-least 0.9"),
    ],
)
def test_the_gate_says_why_it_is_closed(
    settings: Settings, ledger: Any, run: str, options: dict[str, Any], reason: str
) -> None:
    promote(ledger, settings, "good")
    with pytest.raises(PromotionRefused, match=f"^{run} is not promoted: .*{reason}.*--force$"):
        promote(ledger, settings, run, **options)
    assert champion(settings) == "good"


def test_with_other_prompts_means_are_compared(settings: Settings, ledger: Any) -> None:
    promote(ledger, settings, "good")
    promotion = promote(ledger, settings, "other-seed")
    assert promotion.comparison is not None
    assert not promotion.comparison.paired
    assert promotion.comparison.difference.value == 0.25
    assert "on different prompts" in str(promotion)


def test_an_evaluated_checkpoint_is_named_where_the_newest_was_not(settings: Settings, ledger: Any) -> None:
    made = TrackedRun(settings, "early", tracking={"traces": 0})
    made.steps(1)
    made.checkpoint(1)
    made.evaluate(1.0, 1.0, 1.0, 1.0)
    made.steps(2)
    made.checkpoint(2)
    made.complete()
    send_now(made.ledger, "early", settings, made.config)
    with pytest.raises(PromotionRefused, match="evaluated ones: --checkpoint 1"):
        promote(ledger, settings, "early")
    assert promote(ledger, settings, "early", checkpoint="1").version.step == 1
    names = {record.step: record.name for record in ledger.checkpoints("early")}
    assert names == {1: "registered-1", 2: "registered-2"}


def test_the_champion_before_comes_back_step_by_step(settings: Settings, ledger: Any) -> None:
    for run in ("worse", "good", "better"):
        promote(ledger, settings, run)
    assert isinstance(rollback(settings, "tiny"), Rollback)
    assert champion(settings) == "good"
    back = rollback(settings)
    assert champion(settings) == "worse"
    assert (back.now.run_id, back.before.run_id) == ("worse", "good")
    with pytest.raises(PromotionRefused, match="the first champion of tiny"):
        rollback(settings, "tiny")
    promote(ledger, settings, "better")
    assert rollback(settings).now.run_id == "worse"


def test_a_kill_within_a_promotion_leaves_the_way_back(settings: Settings, ledger: Any) -> None:
    """The alias was moved, the line of champions was not written."""
    promote(ledger, settings, "good")
    client = MlflowClient(settings.tracking_uri)
    line = client.get_registered_model("tiny").tags[CHAMPIONS_TAG]
    promote(ledger, settings, "better")
    client.set_registered_model_tag("tiny", CHAMPIONS_TAG, line)
    assert rollback(settings).now.run_id == "good"
    assert champion(settings) == "good"


def test_training_starts_from_the_champions_files(settings: Settings, ledger: Any) -> None:
    with pytest.raises(ConfigError, match="has no such model; promote a run first: sao promote RUN"):
        resolve_model("models:/tiny@champion", settings)
    promote(ledger, settings, "good")
    folder = Path(resolve_model("models:/tiny@champion", settings, ledger))
    assert (folder / "model.safetensors").read_text() == "good version 1"
    assert resolve_model("/some/folder", settings) == "/some/folder"
    assert resolve_model("tiny", settings) == "tiny"
    for wrong in ("models:/tiny", "models:/tiny/x", "models:/a/b/c"):
        with pytest.raises(ConfigError, match=r"model\.path must be models:/NAME@champion"):
            resolve_model(wrong, settings)
    with pytest.raises(ConfigError, match="no such version"):
        resolve_model("models:/tiny/99", settings)


def test_a_champion_of_another_ledger_is_not_trained_from(
    settings: Settings, ledger: Any, tmp_path: Path, migrated_sqlite: Path
) -> None:
    promote(ledger, settings, "good")
    shutil.copy(migrated_sqlite, tmp_path / "other.db")
    environ = {"SAO_HOME": str(tmp_path), "SAO_DATABASE_URL": f"sqlite:///{tmp_path / 'other.db'}"}
    with pytest.raises(ConfigError, match="cannot be had here"):
        resolve_model("models:/tiny@champion", Settings.from_environment(environ, tmp_path))


def test_what_is_registered_outlives_upkeep(settings: Settings, ledger: Any) -> None:
    promote(ledger, settings, "good")
    objects = ObjectStore.from_settings(settings)
    before = objects.keys("artifacts")
    assert before
    Upkeep(ledger, objects, settings, grace_s=0.0).everything()
    found = verify(ledger, objects, "good")
    assert (found.orphans, [violation.rule for violation in found.violations]) == ((), ["ended-run"])  # of one step
    assert objects.keys("artifacts") == before
    assert Path(resolve_model("models:/tiny@champion", settings), "model.safetensors").is_file()


def test_a_run_that_mlflow_does_not_know_is_not_promoted(settings: Settings, ledger: Any) -> None:
    made = TrackedRun(settings, "unknown")
    made.steps(1)
    made.checkpoint(1)
    made.complete()
    with pytest.raises(TrackingError, match="sao sync unknown"):
        promote(ledger, settings, "unknown")
    away = Settings.from_environment(
        {"SAO_HOME": str(settings.home), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}, settings.home
    )
    with pytest.raises(TrackingError, match=r"MLflow at http://127\.0\.0\.1:9: nothing listens there"):
        promote(ledger, away, "good")


def command(monkeypatch: pytest.MonkeyPatch, settings: Settings, *arguments: str) -> int:
    monkeypatch.setenv("SAO_HOME", str(settings.home))
    monkeypatch.setenv("SAO_OBJECT_STORE", settings.object_store)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sys, "argv", ["sao", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_commands_say_what_they_did(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, settings, "promote", "nobody") == 2
    assert command(monkeypatch, settings, "promote", "good", "--checkpoint", "9") == 2
    assert command(monkeypatch, settings, "rollback") == 2
    assert command(monkeypatch, settings, "promote", "good") == 0
    assert "is the champion now" in capsys.readouterr().out
    assert command(monkeypatch, settings, "promote", "worse") == 1
    refused = capsys.readouterr()
    assert refused.err.startswith("error: worse is not promoted: it is worse than tiny version")
    assert (len(refused.err.splitlines()), refused.out) == (1, "")
    assert command(monkeypatch, settings, "promote", "better", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["uri"] == "models:/tiny@champion"
    assert (shown["reward"]["mean"], shown["difference"]["mean"], shown["paired"]) == (0.875, 0.125, True)
    assert command(monkeypatch, settings, "rollback", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "good"
    assert command(monkeypatch, settings, "rollback") == 1
    assert "there is none before it" in capsys.readouterr().err
    assert command(monkeypatch, settings, "sync", "good") == 0


def test_a_run_is_registered_once(settings: Settings) -> None:
    found = versions(MlflowClient(settings.tracking_uri), "tiny")
    assert sorted(version.run_id for version in found) == sorted(RUNS)


def test_a_mean_has_the_interval_of_students_t() -> None:
    """0, 1, 2, 3: mean 1.5, standard error 1.290994 / 2, t(3; 0.975) = 3.182446."""
    mean = Mean.of([0.0, 1.0, 2.0, 3.0])
    assert mean.value == 1.5
    assert mean.high - mean.value == pytest.approx(3.182446 * 1.290994 / 2, abs=1e-5)
    assert mean.value - mean.low == pytest.approx(mean.high - mean.value)
    assert Mean.of([1.0]).as_dict() == {"mean": 1.0, "low": None, "high": None, "prompts": 1}


def test_pairing_removes_what_prompts_have_in_common() -> None:
    ours = {f"p{i}": i / 10 + 0.01 for i in range(10)}
    theirs = {f"p{i}": i / 10 for i in range(10)}
    paired = compare(ours, theirs, "sums", same_prompts=True)
    assert paired.difference.value == pytest.approx(0.01)
    assert paired.difference.high - paired.difference.low < 1e-9
    apart = compare(ours, theirs, "sums", same_prompts=False)
    assert apart.difference.value == pytest.approx(0.01)
    assert apart.difference.low < -0.2
    some = compare(ours, {"p3": 0.0, "p4": 0.0, "other": 1.0}, "sums", same_prompts=True)
    assert (some.paired, some.difference.prompts, some.champion.value) == (True, 2, 0.0)


def test_a_registered_model_has_a_name_that_a_uri_can_hold() -> None:
    assert model_name("my recipe: 2/3@x") == "my_recipe__2_3_x"
