"""Writes texts in a given style from sentences that are at hand. It has no preference and makes no mistakes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sao_core.config import ConfigError
from sao_core.environments.writing.rules import words_of
from sao_core.environments.writing.styles import SENTENCES, SHORT_SENTENCES, SUBJECTS

_TRIES = 100


def write(style: str, subject: tuple[str, ...], words: tuple[int, int], rng: random.Random) -> str:
    """A text with ``words`` words at least and at most: one short sentence where that is enough, else several.

    The first sentence is about the subject, the others about something else each, so that no word comes up too often.
    Raises ConfigError if there is no such text.
    """
    fewest, most = words
    for _ in range(_TRIES):
        first = rng.choice(SENTENCES[style][:SHORT_SENTENCES])
        sentences = [first.format(a=subject[0], b=subject[1])]
        rest = [sentence for sentence in SENTENCES[style] if sentence != first]
        rng.shuffle(rest)
        others = zip(_others(0, subject, rng), _others(1, subject, rng), strict=False)
        for sentence, (a, b) in zip(rest, others, strict=False):
            if len(words_of(" ".join(sentences))) >= fewest:
                break
            sentences.append(sentence.format(a=a, b=b))
        text = " ".join(sentences)
        if fewest <= len(words_of(text)) <= most:
            return text
    raise ConfigError(
        f"the demonstrator of `writing` has no text of {fewest} to {most} words: set environment.options.words to "
        f"bounds that it can keep, such as [40, 70], or warm_start.path to texts of your own"
    )


def _others(kind: int, subject: tuple[str, ...], rng: random.Random) -> Sequence[str]:
    """The subjects of a kind, without the one that was asked for, in random order."""
    names = [name for name in SUBJECTS[kind] if name != subject[kind]]
    return rng.sample(names, len(names))
