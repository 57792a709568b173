"""The text of each token of a sequence, so that the pieces, joined, read as the whole does.

A character may be split over several tokens, and a token may have a space only after another one. So tokens are
decoded after the one before, and held back while they end within a character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST = 4
"""Tokens of one character at most, since UTF-8 has no more bytes of one."""
_LONGEST_CONTEXT = 8


def token_texts(tokenizer: Any, token_ids: Sequence[int], starts: Iterable[int] = ()) -> list[str | None]:
    """The text of each token; None for one that goes on with the character of the token before.

    ``starts`` are places (of turns) that no character crosses. ``tokenizer`` is one of the library `tokenizers`.
    """
    reader = _Reader(tokenizer)
    for start, stop in pairwise(sorted({0, *starts, len(token_ids)})):
        for token_id in token_ids[start:stop]:
            reader.read(int(token_id))
        reader.finish()
    return reader.texts


class _Reader:
    """Reads tokens in order; ``texts`` has one entry for each that is not held back."""

    def __init__(self, tokenizer: Any) -> None:
        self.texts: list[str | None] = []
        self._before: tuple[int, ...] = ()
        self._held: tuple[int, ...] = ()
        self._decode = lru_cache(1 << 16)(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))

    def read(self, token_id: int) -> None:
        self._held += (token_id,)
        text = self._text(self._held)
        if text and not text.endswith(_INCOMPLETE):
            self.finish()
        elif len(self._held) == _LONGEST:
            self._take_first()

    def finish(self) -> None:
        while self._held:
            self._take_first()

    def _take_first(self) -> None:
        """Take the fewest tokens whose text stays as it is when the others follow."""
        whole = self._text(self._held)
        count = next(n for n in range(1, len(self._held) + 1) if whole.startswith(self._text(self._held[:n])))
        taken, self._held = self._held[:count], self._held[count:]
        text = self._text(taken)
        self.texts += [text or None, *[None] * (count - 1)]
        goes_on = not text and len(self._before) < _LONGEST_CONTEXT
        self._before = (*self._before, *taken) if goes_on else taken

    def _text(self, ids: tuple[int, ...]) -> str:
        """What ``ids`` add to the text of the tokens before."""
        head, whole = self._decode(self._before), self._decode((*self._before, *ids))
        return whole.removeprefix(head) if whole.startswith(head) else self._decode(ids)
