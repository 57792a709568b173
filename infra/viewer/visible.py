"""Text that shows what it is made of: what has no shape, or would change the order of its neighbours, gets a name."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but tab and newline
    "\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0"  # blank, though counted as letters or marks
    "\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"  # zero width, line ends, order of writing
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff"  # no characters
    "\U000e0000-\U000e0fff"  # tags: text that nobody sees
    "]"
)


_CONTROLS = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
)
_NAMES = dict(enumerate(_CONTROLS.split()))


def visible(text: str) -> str:
    """``text`` with ``‹ESC›`` for a control character and ``‹U+202E›`` for any other that cannot be seen.

    Tab, newline, and the joiners that scripts and emoji are written with stay as they are.
    """
    return _UNSEEN.sub(_name, text)


def _name(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"‹{_NAMES.get(code, f'U+{code:04X}')}›"
