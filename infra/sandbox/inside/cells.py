"""A session's Python: takes pieces of code, runs each like a notebook cell, says how it went, keeps the variables.

It shares its interpreter with code that nobody trusts: whatever it answers may be forged, and the worker believes it
only about this session's own text.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import socket
import sys
import traceback
import types
from typing import Any

from infra.sandbox.inside import wire


def serve(descriptor: int) -> None:
    """Answer until the worker lets go."""
    connection = socket.socket(fileno=descriptor)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv, sys.path[0] = [""], ""
    me = os.getpid()
    number = 0
    while (frame := wire.receive(connection)) is not None:
        header, blobs = frame
        number += 1
        code = _run(blobs[0].decode(), f"<cell {number}>", module.__dict__)
        if os.getpid() != me:  # the code has forked: only the first of the two goes on as the session
            os._exit(0)
        connection.sendall(json.dumps({"id": header["id"], "code": code}).encode() + b"\n")


def _run(source: str, filename: str, names: dict[str, Any]) -> int:
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = 0
    try:
        tree = ast.parse(source, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, filename, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), names)
            if value is not None:
                print(repr(value))
    except SystemExit as leaving:
        code = int(leaving.code not in (None, 0))
    except BaseException as error:
        below = error.__traceback__.tb_next if error.__traceback__ else None
        _say(error.with_traceback(None if isinstance(error, SyntaxError) and error.filename == filename else below))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the code has closed or replaced it
            code = code or 1
    return code


def _say(error: BaseException) -> None:
    try:
        traceback.print_exception(error)
    except Exception:  # its text cannot be made, or standard error is gone
        os.write(2, f"{type(error).__name__}\n".encode())
