"""The judge that needs no model: rules on words.

It asks what can be counted: length, subject, ending, repetition, copying, stuffing, and the words that give a style
away. It does not understand what it reads; a writer that is good enough to fool it deserves a model as its judge.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from sao_core.environments.writing.styles import MARKERS, word_set
from sao_core.environments.writing.verdict import Assignment, Verdict

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_END = re.compile(r"[.!?…][\"'”’)*]*$")
_FUNCTION_WORDS = word_set(
    "a an the of in on at to from with by for and or but if as is are was were be been has have had it its he she "
    "they we you i my our your his her their this that these those there then than not no so every some any one all "
    "what who which how when where while me him them us do does did will would can could may might must shall should "
    "up down out into over under near before after about "
    "thou thee thy thine hath doth hast dost art"
)
_NEVER_AFTER_ARTICLE = word_set("a an the of in on at to from with by for and or but if is are was were it")
_ARTICLES = frozenset({"a", "an", "the"})
_CONTENT_MARKERS = frozenset().union(*MARKERS.values()) - _FUNCTION_WORDS

COPIED_WORDS = 5
"""As many words in a row as the prompt has them are copied."""
STUFFED_RUN = 3
"""As many markers in a row are a list, not a text."""
MOST_MARKERS = 0.4
"""Largest share of markers among the words."""
FUNCTION_WORDS = (0.15, 0.75)
"""Share of words without which there is no sentence."""
WORDS_PER_OCCURRENCE = 10
"""For so many words, one that is no function word may occur once (twice in any text)."""
WORDS_PER_REPETITION = 20
"""For so many words, one run of three may occur twice."""
PLAIN = 0.9
"""Share of letters, spaces and punctuation."""
WORDS_PER_MARKER = 15
"""A text in a style has a marker of it for every so many words, and at least :data:`FEWEST_MARKERS`."""
FEWEST_MARKERS = 2
OTHERS = 0.25
"""Distinct markers of all other styles together, as a share of those of the style: more is a mixture."""
SPREAD = 0.5
"""Share of the sentences that have a marker of the style in them."""
LONGEST_TEXT_CHARACTERS = 20_000
"""What is longer is not looked at."""


class RuleJudge:
    """Stateless; every text gets the same verdict each time."""

    async def judge(self, text: str, assignment: Assignment) -> Verdict:
        """The verdict by :func:`fault_of` and :func:`style_of`."""
        return Verdict(fault_of(text, assignment), style_of(text))


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without numbers and punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text[:LONGEST_TEXT_CHARACTERS].casefold())]


def length_fault(text: str, assignment: Assignment) -> str | None:
    """What is wrong with a text's length; None if nothing is."""
    count, (fewest, most) = len(words_of(text)), assignment.words
    if len(text) > LONGEST_TEXT_CHARACTERS or count > most:
        return f"too long: more than {most} words"
    return f"too short: fewer than {fewest} words" if count < fewest else None


def fault_of(text: str, assignment: Assignment) -> str | None:
    """The first fault of a text, for people to read; None if its quality is good."""
    return length_fault(text, assignment) or next(_faults(text.strip(), assignment), None)


def _faults(text: str, assignment: Assignment) -> Iterator[str]:
    words = words_of(text)
    counts = Counter(words)
    if not _END.search(text):
        yield "does not end like a sentence"
    for word in assignment.subject:
        if not any(form in counts for form in (word, f"{word}s", f"{word}es", f"{word}'s")):
            yield f"does not mention {word}"
    plain = sum(character.isalpha() or character in " \n.,;:!?'’\"“”()-–—…~" for character in text)
    if plain < PLAIN * len(text):
        yield "is not plain text"
    if any(before == after for before, after in pairwise(words)):
        yield "repeats a word at once"
    often = max(2, math.ceil(len(words) / WORDS_PER_OCCURRENCE))
    for word, count in counts.items():
        if count > often and word not in _FUNCTION_WORDS:
            yield f"says {word} {count} times"
    trigrams = _runs(words, 3)
    if len(trigrams) - len(set(trigrams)) > len(words) // WORDS_PER_REPETITION:
        yield "repeats itself"
    if set(_runs(words, COPIED_WORDS)) & set(_runs(words_of(assignment.prompt), COPIED_WORDS)):
        yield "copies the prompt"
    low, high = FUNCTION_WORDS
    if not low <= sum(word in _FUNCTION_WORDS for word in words) / len(words) <= high:
        yield "is no sentence"
    sentences = [words_of(sentence) for sentence in _sentences(text)]
    for spoken in sentences:
        if any(a in _ARTICLES and b in _NEVER_AFTER_ARTICLE for a, b in pairwise(spoken)) or spoken[-1] in _ARTICLES:
            yield "has an article without a noun"
    longest_run = max(_longest_run_of_markers(spoken) for spoken in sentences)
    if longest_run >= STUFFED_RUN or sum(word in _CONTENT_MARKERS for word in words) > MOST_MARKERS * len(words):
        yield "is stuffed with words of a style"


def style_of(text: str) -> str | None:
    """The style that a text is written in, and in no other; None if there is no such one."""
    words = words_of(text)
    found = {style: len(set(words) & markers) for style, markers in MARKERS.items()}
    style = max(found, key=lambda name: found[name])
    own, others = found[style], sum(found.values()) - found[style]
    if own < max(FEWEST_MARKERS, len(words) / WORDS_PER_MARKER) or others > OTHERS * own:
        return None
    sentences = [words_of(sentence) for sentence in _sentences(text)]
    marked = sum(not MARKERS[style].isdisjoint(sentence) for sentence in sentences)
    return style if marked >= SPREAD * len(sentences) else None


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(r"[.!?…\n]+", text[:LONGEST_TEXT_CHARACTERS]) if words_of(part)]


def _longest_run_of_markers(words: Sequence[str]) -> int:
    return max(
        (len(list(run)) for marked, run in groupby(words, key=_CONTENT_MARKERS.__contains__) if marked), default=0
    )


def _runs(words: Sequence[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]
