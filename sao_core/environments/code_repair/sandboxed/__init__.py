"""Programs that run inside the sandbox, next to a candidate's code: standard library only, sent there as text."""

from __future__ import annotations

from pathlib import Path

_START = """\
import os, sys
sys.dont_write_bytecode = True
sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd()){more}]
"""
"""Both modules are there already when a program starts; no file of a candidate's can stand for a later one."""
_NO_PACKAGES = ' and not path.endswith(("site-packages", "dist-packages"))'


def program(name: str, packages: bool = False) -> list[str]:
    """The command that runs one of these programs in the folder that holds a candidate's files.

    That folder is no place for modules until the program says so; ``packages`` lets it import what is installed.
    """
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return ["python", "-c", _START.format(more="" if packages else _NO_PACKAGES) + text]
