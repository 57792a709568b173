"""Bad input gets one line that names the value and the way out, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flows import cli
from infra.manifest import CorruptFolder
from infra.services import ServiceFailed


def sao(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def model_folder(folder: Path, **changes: object) -> Path:
    """A folder that looks like a causal LM until something is taken away."""
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"]} | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def no_template(folder: Path) -> Path:
    path = model_folder(folder / "no-template")
    (path / "tokenizer_config.json").write_text("{}")
    return path


def no_answer(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text('{"prompt": "1+1?", "answer": "2"}\n{"prompt": "2+2?"}\n')
    return path


BAD = {
    "unknown recipe": (lambda d: ["train", "tinny"], "unknown recipe `tinny`; did you mean `tiny`?"),
    "unknown key": (lambda d: ["train", "tiny", "--set", "policy.lrr=1"], "did you mean `policy.lr`?"),
    "epsilon outside its range": (
        lambda d: ["train", "tiny", "--set", "algorithm.eps_low=1.2"],
        "algorithm.eps_low must be less than 1: got 1.2",
    ),
    "top-p for training": (lambda d: ["train", "tiny", "--set", "rollout.top_p=0.9"], "rollout.top_p must be 1"),
    "a model folder that is none": (
        lambda d: ["train", "tiny", "--set", f"model.path={d}/nothing"],
        "model.path is not a folder",
    ),
    "a model that is no causal LM": (
        lambda d: ["train", "tiny", "--set", f"model.path={model_folder(d / 'm', architectures=['BertModel'])}"],
        "must be a causal language model",
    ),
    "a tokenizer without a chat template": (
        lambda d: ["train", "tiny", "--set", f"model.path={no_template(d)}"],
        "has no chat template",
    ),
    "a row without an answer": (
        lambda d: [
            *("train", "tiny", "--set", "environment.name=jsonl"),
            *("--set", f"environment.options.path={no_answer(d)}"),
        ],
        "rows.jsonl:2",
    ),
    "a batch that could never fill": (
        lambda d: [
            *("train", "tiny", "--set", "asynchrony.max_token_age=1"),
            *("--set", "asynchrony.stale=reject"),
        ],
        "a batch could never fill",
    ),
    "an unknown environment": (
        lambda d: ["train", "tiny", "--set", "environment.name=calculater"],
        "did you mean `calculator`?",
    ),
    "an unknown environment option": (
        lambda d: ["train", "tiny", "--set", "environment.options.max_operation=3"],
        "max_operation",
    ),
    "an unknown run": (lambda d: ["show", "nobody"], "there is no run nobody"),
    "an unknown trajectory": (lambda d: ["trajectory", "nobody"], "there is no trajectory 'nobody'"),
    "an unknown run to resume": (lambda d: ["train", "--resume", "nobody"], "there is no run nobody"),
    "an unknown run to export": (lambda d: ["export", "nobody", "out"], "there is no run nobody"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, tmp_path: Path) -> None:
    arguments, expected = BAD[case]
    done = sao(tmp_path, *arguments(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".sao" / "objects").exists()


def test_dry_run_starts_nothing_and_says_what_would_start(tmp_path: Path) -> None:
    done = sao(tmp_path, "train", "tiny", "--dry-run")
    assert done.returncode == 0
    assert "keeps ratios in (0.70, 6.00)" in done.stdout
    assert "would start: 1 learner" in done.stdout
    assert not (tmp_path / ".sao").exists()


def test_recipes_and_runs_speak_json(tmp_path: Path) -> None:
    assert "tiny" in {row["recipe"] for row in json.loads(sao(tmp_path, "recipes", "--json").stdout)}
    assert json.loads(sao(tmp_path, "runs", "--json").stdout) == []


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    done = sao(tmp_path, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert {"torch", "ledger", "object store", "Prefect", "MLflow"} <= set(checks)


@pytest.mark.parametrize(
    "error",
    [CorruptFolder("runs/r/policies/1-1/model.safetensors has sha256 ab"), ServiceFailed("port 4200 is taken")],
    ids=["damaged storage", "a port in use"],
)
def test_work_that_fails_is_one_line_and_exit_code_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    assert capsys.readouterr().err == f"error: {error}\n"
