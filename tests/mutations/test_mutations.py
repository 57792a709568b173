"""Every mutation of the table, applied to a copy of the code, turns its test red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from table import TABLE, Mutation

ROOT = Path(__file__).parents[2]
COPIED = ("sao_core", "infra", "tasks", "flows", "tests", "pyproject.toml")


def copy_of_the_code(target: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "e2e", "mutations"))
        else:
            shutil.copy(source, target / name)
    return target


def run(test: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", test],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("mutation", TABLE, ids=lambda m: m.name)
def test_mutation_turns_its_test_red(mutation: Mutation, tmp_path: Path) -> None:
    folder = copy_of_the_code(tmp_path)
    path = folder / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has {text.count(mutation.old)} places to mutate"
    path.write_text(text.replace(mutation.old, mutation.new))
    done = run(mutation.test, folder)
    tests_failed = 1  # pytest's exit codes: 0 all passed, 1 some failed, 2 and above it could not run them
    assert done.returncode == tests_failed, done.stdout[-3000:] + done.stderr[-2000:]
