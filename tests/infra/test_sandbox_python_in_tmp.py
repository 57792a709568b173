"""A Python that is installed below /tmp is seen in the box, although the program's own disk lies at /tmp."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from sandbox_fixtures import KINDS

from infra.sandbox.isolation import Kind

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, json, sys
sys.path += json.loads(sys.argv[1])
from infra.sandbox.isolation import Kind
from infra.sandbox.runner import Sandbox

INSIDE = "import sys, only_here; print(sys.prefix, only_here.WHERE); open('/tmp/mine', 'w'); only_here.spoil()"

async def main():
    sandbox = Sandbox(Kind(sys.argv[2]))
    try:
        return await sandbox.run(["python", "-c", INSIDE])
    finally:
        sandbox.close()

ran = asyncio.run(main())
print(json.dumps([ran.exit_code, ran.stdout, ran.stderr]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_python_below_tmp_runs_in_the_box_with_its_packages(kind: Kind, tmp_path: Path) -> None:
    assert tmp_path.is_relative_to("/tmp")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "only_here.py").write_text(
        "WHERE = __file__\ndef spoil():\n    try: open(WHERE, 'a')\n    except OSError as e: print(e.strerror)\n"
    )
    (packages / "only_here.py").chmod(0o666)
    borrowed = json.dumps([str(ROOT), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", PROGRAM, borrowed, kind], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    code, stdout, stderr = json.loads(done.stdout)
    assert (code, stderr) == (0, "")
    assert stdout.split()[0] == str(venv)
    assert stdout.split()[1].startswith(str(venv))
    assert "Read-only file system" in stdout
