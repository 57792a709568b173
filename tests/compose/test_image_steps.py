"""The steps by which the Dockerfile installs, run in an empty environment with only the files that it copies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


def builder_steps() -> list[tuple[str, str]]:
    """The COPY and RUN instructions of the stage `builder`, lines joined."""
    stage = (ROOT / "Dockerfile").read_text().split(" AS builder\n")[1].split("\nFROM ")[0]
    joined = stage.replace("\\\n", "")
    return re.findall(r"^(COPY|RUN) (.+)$", joined, re.MULTILINE)


def test_the_image_can_be_installed_from_what_it_copies(tmp_path: Path) -> None:
    venv, source = tmp_path / "sao", tmp_path / "src"
    source.mkdir()
    index = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SAO_", "PYTHON"))},
        "PATH": f"{venv}/bin:{Path(sys.executable).resolve().parent}:{os.environ['PATH']}",
        "TORCH_INDEX": index,
        "VIRTUAL_ENV": "",
    }
    for kind, text in builder_steps():
        if kind == "COPY":
            *sources, target = text.split()
            for name in sources:
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / name, source / target, ignore=ignored)
                else:
                    shutil.copy(ROOT / name, source / target)
            continue
        command = text.replace("/opt/sao", str(venv))
        done = subprocess.run(
            ["sh", "-c", command], cwd=source, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(source)  # nothing of the tree is used any more
    check = subprocess.run(
        ["sao", "doctor", "--only", "python,ledger,object-store"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr
    for program in ("prefect --version", "mlflow --version"):
        subprocess.run(program.split(), cwd=elsewhere, env=environment, check=True, capture_output=True)
    modules = "import prefect_redis, flask_wtf, boto3, flows.deployments as d; print(len(d.deployments()))"
    listed = subprocess.run(
        [str(venv / "bin" / "python"), "-c", modules],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(listed.stdout) > 5
