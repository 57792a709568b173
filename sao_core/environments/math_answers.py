r"""Is a mathematical answer right? The last ``\boxed{}`` of a text against the known answer, through math-verify.

math-verify parses what a model wrote with SymPy, which can take for ever and evaluates code, so it runs where the
model's own code runs, with limits; only equal texts and whole numbers are compared here.
"""

from __future__ import annotations

import json
import re

from sao_core.outside import CodeRunner, Limits, StoppedBy

CHECK_LIMITS = Limits(wall_s=40.0, cpu_s=15.0, memory_bytes=2**30)
"""Importing SymPy takes about a second of CPU time; math-verify allows itself 5 s for each of parsing and comparing."""
MAX_CHARACTERS = 1000
"""A longer answer is no answer that a person would accept."""

_PROGRAM = """
import json, sys
from math_verify import parse, verify
known, given = (parse("$" + text + "$") for text in json.load(sys.stdin))
print("right" if verify(known, given) else "wrong")
"""
_BRACE = re.compile(r"(?P<box>\\f?boxed\s*\{)|\\[{}]|[{}]")
_WHOLE = re.compile(r"[+-]?[0-9]{1,1000}")


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` (or ``\fbox{}``) of a text, braces balanced; None without one."""
    starts: list[int | None] = []  # of the braces that are open, where the content of a box begins
    last, found = -1, None
    for mark in _BRACE.finditer(text):
        if mark["box"]:
            starts.append(mark.end())
        elif mark[0] == "{":
            starts.append(None)
        elif mark[0] == "}" and starts:
            start = starts.pop()
            if start is not None and start > last:
                last, found = start, text[start : mark.start()].strip()
    return found


async def is_right(given: str, known: str, code: CodeRunner) -> bool:
    """Whether two answers in LaTeX or plain text mean the same; one that cannot be compared in time is wrong.

    Raises RuntimeError if the check itself broke.
    """
    given, known = _plain(given), _plain(known)
    if given == known:
        return True
    if not given or len(given) > MAX_CHARACTERS:
        return False
    if _WHOLE.fullmatch(given) and _WHOLE.fullmatch(known):
        return int(given) == int(known)
    ran = await code.run(["python", "-c", _PROGRAM], stdin=json.dumps([known, given]), limits=CHECK_LIMITS)
    verdict = ran.stdout.strip()
    if ran.exit_code == 0 and verdict in ("right", "wrong"):
        return verdict == "right"
    if ran.stopped_by not in (None, StoppedBy.SANDBOX):
        return False
    reason = ran.stderr.strip().splitlines()[-1:] or ["no reason given"]
    raise RuntimeError(f"checking an answer with math-verify broke: {reason[0]}")


def _plain(text: str) -> str:
    """Without what frames an answer, and the separators of thousands in a whole number."""
    text = text.strip().strip("$").strip()
    inner = boxed(text)
    if inner is not None:
        text = inner
    whole = re.sub(r"(?<=[0-9])(?:,|\\,|\{,\}|\\!)+(?=[0-9]{3}(?![0-9]))", "", text)
    return whole if _WHOLE.fullmatch(whole) else text
