"""Becomes the program that was asked for: Python in this very interpreter, which is up already; all else by exec.

Run in the child, after it has lost every privilege. `python FILE`, `python -c CODE` and `python -m MODULE` behave as
from a shell; other uses of `python` get an interpreter of their own.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_BROKEN_OUTPUT = 120


def of(argv: Sequence[str]) -> Callable[[], None]:
    """What to call to be ``argv``; it returns, or raises SystemExit, where a script would end."""
    name, *rest = argv
    if name not in ("python", "python3") or not rest or (rest[0].startswith("-") and len(rest) < 2):
        return partial(_exec, argv)
    if rest[0] == "-c":
        return partial(_run_code, rest[1], rest[2:])
    if rest[0] == "-m":
        return partial(_run_module, rest[1], rest[2:])
    if rest[0].startswith("-") or not os.path.isfile(rest[0]):
        return partial(_exec, argv)
    return partial(_run_file, rest[0], rest[1:])


def leave(work: Callable[[], None]) -> NoReturn:
    """Run it and end the process as the interpreter would, except that it takes nothing apart first: that is slow."""
    code = 0
    try:
        work()
    except SystemExit as leaving:
        match leaving.code:
            case None:
                pass
            case int(number):
                code = number & 0xFF
            case words:
                print(words, file=sys.stderr)
                code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except (Exception, SystemExit):
        code = code or _BROKEN_OUTPUT
    os._exit(code)


def _exec(argv: Sequence[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    name = sys.executable if argv[0] in ("python", "python3") else argv[0]
    try:
        os.execvp(name, list(argv))
    except FileNotFoundError:
        print(f"{argv[0]}: not found", file=sys.stderr)
        raise SystemExit(NOT_FOUND) from None
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(NOT_EXECUTABLE) from None


def _run_code(source: str, args: Sequence[str]) -> None:
    sys.argv = ["-c", *args]
    sys.path[0] = ""
    _execute(source, "<string>")


def _run_file(path: str, args: Sequence[str]) -> None:
    sys.argv = [path, *args]
    path = os.path.abspath(path)
    sys.path[0] = os.path.dirname(path)
    with open(path, "rb") as file:
        source = file.read()
    _execute(source, path, __file__=path)


def _run_module(name: str, args: Sequence[str]) -> None:
    sys.argv = ["-m", *args]
    sys.path[0] = os.getcwd()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what the interpreter itself calls


def _execute(source: str | bytes, filename: str, **names: str) -> None:
    module = types.ModuleType("__main__")
    module.__dict__.update(names)
    sys.modules["__main__"] = module
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        below = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(below), below)
        raise SystemExit(1) from None
