"""Catalogue: functions on text."""

from __future__ import annotations

import random

from sao_core.environments.code_repair.catalogue.draws import sentence, word, words
from sao_core.environments.code_repair.catalogue.entry import Entry


def truncate(text: str, width: int) -> str:
    """Shorten text to at most width characters.

    A text that fits is returned as it is. A longer one is cut and ends in "...", which counts towards the width.
    A width of 3 or less leaves no room for the dots: the text is just cut.

    >>> truncate("a longer text", 9)
    'a long...'
    >>> truncate("abcd", 3)
    'abc'
    """
    if len(text) <= width:
        return text
    if width <= 3:
        return text[:width]
    return text[: width - 3] + "..."


def capitalize_words(text: str) -> str:
    """Make the first letter of each word a capital and leave the other letters alone. Words are parted by one space.

    >>> capitalize_words("the oLD man")
    'The OLD Man'
    """
    result = []
    for part in text.split(" "):
        if part:
            part = part[0].upper() + part[1:]
        result.append(part)
    return " ".join(result)


def count_vowels(text: str) -> int:
    """Count the vowels a, e, i, o and u, small or capital.

    >>> count_vowels("Ubuntu")
    3
    """
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def is_palindrome(text: str) -> bool:
    """Say whether a text reads the same both ways. Case, and characters other than letters and digits, do not count.

    >>> is_palindrome("Never odd, or even!")
    True
    >>> is_palindrome("ab")
    False
    """
    kept = [letter.lower() for letter in text if letter.isalnum()]
    left, right = 0, len(kept) - 1
    while left < right:
        if kept[left] != kept[right]:
            return False
        left += 1
        right -= 1
    return True


def caesar(text: str, shift: int) -> str:
    """Move each small letter shift places on in the alphabet, from z on to a. Other characters stay.

    >>> caesar("xyz!", 2)
    'zab!'
    """
    result = ""
    for letter in text:
        if "a" <= letter <= "z":
            place = (ord(letter) - ord("a") + shift) % 26
            result += chr(ord("a") + place)
        else:
            result += letter
    return result


def run_length_encode(text: str) -> str:
    """Write each run of a character as the character and the length of the run, also for a run of one.

    >>> run_length_encode("aaabcc")
    'a3b1c2'
    """
    result = ""
    start = 0
    while start < len(text):
        stop = start
        while stop < len(text) and text[stop] == text[start]:
            stop += 1
        result += text[start] + str(stop - start)
        start = stop
    return result


def longest_run(text: str) -> tuple[str, int]:
    """Find the longest run of one character: the character and the length. Of equally long runs the first one counts.

    An empty text has the run ("", 0).

    >>> longest_run("abbcc")
    ('b', 2)
    """
    best, best_length = "", 0
    length = 0
    for index, letter in enumerate(text):
        if index > 0 and text[index - 1] == letter:
            length += 1
        else:
            length = 1
        if length > best_length:
            best, best_length = letter, length
    return best, best_length


def common_prefix(items: list[str]) -> str:
    """Find the longest text that all items begin with. No items have the prefix "".

    >>> common_prefix(["flower", "flow", "flight"])
    'fl'
    """
    if not items:
        return ""
    prefix = items[0]
    for item in items[1:]:
        while not item.startswith(prefix):
            prefix = prefix[:-1]
            if not prefix:
                return ""
    return prefix


def snake_case(name: str) -> str:
    """Turn a name in camel case into snake case: each capital becomes a small letter after an underscore.

    A capital at the very start gets no underscore.

    >>> snake_case("parseHttpUrl")
    'parse_http_url'
    """
    result = ""
    for index, letter in enumerate(name):
        if letter.isupper() and index > 0:
            result += "_"
        result += letter.lower()
    return result


def camel_case(name: str) -> str:
    """Turn a name in snake case into camel case: the first part stays small, each later one gets a capital.

    Empty parts, as between two underscores, are left out.

    >>> camel_case("parse_http__url")
    'parseHttpUrl'
    """
    parts = [part for part in name.split("_") if part]
    if not parts:
        return ""
    return parts[0] + "".join(part.capitalize() for part in parts[1:])


def wrap_words(text: str, width: int) -> list[str]:
    """Break a text into lines of at most width characters, only between words; a longer word has a line of its own.

    >>> wrap_words("to be or not to be", 8)
    ['to be or', 'not to', 'be']
    """
    lines: list[str] = []
    line = ""
    for item in text.split():
        if not line:
            line = item
        elif len(line) + 1 + len(item) <= width:
            line += " " + item
        else:
            lines.append(line)
            line = item
    if line:
        lines.append(line)
    return lines


def mask_middle(text: str, keep: int) -> str:
    """Show the first and the last keep characters and a star for each one between. A text of 2*keep or fewer stays.

    >>> mask_middle("4929123456", 2)
    '49******56'
    """
    if len(text) <= 2 * keep:
        return text
    hidden = len(text) - 2 * keep
    return text[:keep] + "*" * hidden + text[len(text) - keep :]


def edit_distance(first: str, second: str) -> int:
    """Count the fewest insertions, deletions and replacements of one character that make the second text of the first.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, start=1):
        above = row
        row = [i]
        for j, right in enumerate(second, start=1):
            cost = 0 if left == right else 1
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + cost))
    return row[-1]


def is_anagram(first: str, second: str) -> bool:
    """Say whether two texts have the same letters equally often. Case and spaces do not count.

    >>> is_anagram("Dirty room", "dormitory")
    True
    """
    left = sorted(first.lower().replace(" ", ""))
    right = sorted(second.lower().replace(" ", ""))
    return left == right


def _mirrored(rng: random.Random) -> str:
    half = word(rng, "aab, ", 4, 0)
    return half + rng.choice(("", "b", ",", "A")) + rng.choice((half.upper()[::-1], half[::-1], half, word(rng, "ab")))


ENTRIES = (
    Entry(truncate, lambda rng: (word(rng, "abc de", 14, 0), rng.randint(0, 12))),
    Entry(capitalize_words, lambda rng: (sentence(rng) + rng.choice(("", " ", "  a")),)),
    Entry(count_vowels, lambda rng: (word(rng, "aeiouAEIOUbcdXYZ", 12, 0),)),
    Entry(is_palindrome, lambda rng: (_mirrored(rng),)),
    Entry(caesar, lambda rng: (word(rng, "abmyzA ,", 8, 0), rng.randint(-30, 30))),
    Entry(run_length_encode, lambda rng: (word(rng, "aab", 9, 0),)),
    Entry(longest_run, lambda rng: (word(rng, "aabbc", 10, 0),)),
    Entry(
        common_prefix,
        lambda rng: ((lambda start: [start + w for w in words(rng, 4, letters="ab")])(word(rng, "ab", 4, 0)),),
    ),
    Entry(snake_case, lambda rng: (word(rng, "abcABC", 8, 0),)),
    Entry(camel_case, lambda rng: (word(rng, "abc_", 10, 0),)),
    Entry(wrap_words, lambda rng: (sentence(rng, 7), rng.randint(3, 14))),
    Entry(mask_middle, lambda rng: (word(rng, "0123456789", 10, 0), rng.randint(0, 5))),
    Entry(edit_distance, lambda rng: (word(rng, "ab", 5, 0), word(rng, "abc", 5, 0))),
    Entry(
        is_anagram,
        lambda rng: (lambda w: (w.upper(), "".join(rng.sample(w, len(w))) + rng.choice(("", " ", "", "b"))))(
            word(rng, "aab ", 6, 0)
        ),
    ),
)
