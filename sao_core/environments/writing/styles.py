"""The styles, the words that give each away, and the demonstrator's sentences in them.

Markers are words that one style uses and the others do not; the sets are disjoint. Subjects stand in the sentences as
``{a}`` and ``{b}``. Nothing here judges.
"""

from __future__ import annotations

from collections.abc import Mapping


def word_set(text: str) -> frozenset[str]:
    """The words of a list that is written as one text."""
    return frozenset(text.split())


STYLES = ("academic", "cute", "chuunibyou", "classical")
"""Of an essay · of someone who finds everything sweet · of a self-declared dark hero · of an old book."""

DESCRIPTIONS: Mapping[str, str] = {
    "academic": "sober, impersonal prose as in a scholarly paper",
    "cute": "bubbly, affectionate talk, full of delight in small things",
    "chuunibyou": "the grandiose boasting of someone who believes in their own secret dark powers",
    "classical": "archaic English as in old books and ballads",
}
"""What a judge, or a model that is told what to do, is told of them; free of markers."""

MARKERS: Mapping[str, frozenset[str]] = {
    "academic": word_set(
        "furthermore moreover therefore consequently evidence hypothesis analysis findings empirical "
        "observed significant data theory theoretical method methods methodology results conclude framework "
        "literature indicates indicate demonstrates demonstrate examines examine study studies scholars "
        "phenomenon correlates whereas notably respectively"
    ),
    "cute": word_set(
        "yay aww hehe teehee fluffy cuddly cuddle cuddles snuggly snuggle snuggles tiny sweet cozy adorable hugs hug "
        "sparkly giggle giggles giggly wiggly wiggle boop squishy nom yummy bouncy huggy cutie cute "
        "fuzzy"
    ),
    "chuunibyou": word_set(
        "behold abyss cursed sealed forbidden darkness mortals mortal awakens awaken awakened crimson demon demonic "
        "prophecy dragon inferno destiny unleash unleashed fools incarnate apocalypse void infernal accursed "
        "obsidian tremble kneel bloodline chosen"
    ),
    "classical": word_set(
        "thou thee thy thine doth hath verily ere whence hither thither tis twas lo alas wherefore forsooth betwixt "
        "yonder nay hark oft dost hast shalt quoth prithee methinks whilst erstwhile"
    ),
}
"""The lexicon of the judge by rules."""

SUBJECTS = (
    ("cat", "dog", "fox", "owl", "bear", "crow", "deer", "fish", "frog", "goat", "hen", "king", "moth", "swan", "wolf"),
    ("rain", "sun", "moon", "snow", "wind", "lake", "hill", "river", "tree", "road", "barn", "boat", "garden", "star"),
)
"""Who is written about, and what else has to appear."""

SENTENCES: Mapping[str, tuple[str, ...]] = {
    "academic": (
        "the data on the {a} indicate it, the {b} too.",
        "a study of the {a} and the {b} as evidence.",
        "significant data on {a} and {b} were found.",
        "the theory of the {a} in the {b} has evidence.",
        "the observed {a} and {b} fit the theory.",
        "our analysis of the {a} and the {b} was empirical.",
        "therefore the findings link one {a} to its {b}.",
        "moreover, the literature describes every {a} by the {b}.",
        "this method examines how one {a} responds to some {b}.",
        "we conclude that such a {a} needs that {b}, whereas others do not.",
    ),
    "cute": (
        "yay, a fluffy {a} and the {b}!",
        "aww, the {a} got one {b} hug!",
        "so cozy, the {a} by the {b}, hehe!",
        "a tiny {a} and a sweet {b}, for you!",
        "teehee, the {a} saw a sparkly {b}!",
        "my cuddly {a} did giggle at the {b}!",
        "one squishy {a} went boop on its {b}!",
        "look how adorable every {a} is with some {b}, so fuzzy!",
        "that bouncy {a} ran to this {b} in a wiggly way!",
        "we snuggle up, {a} and {b} and all, nom!",
    ),
    "chuunibyou": (
        "behold, the cursed {a} of the {b}!",
        "the {a} of the abyss, its {b} sealed!",
        "mortals, the {a} and {b} awaken!",
        "fools, my {a} is the {b} of destiny!",
        "the demon {a} took the {b} of the void!",
        "tremble at the crimson {a} and its {b}!",
        "in darkness my {a} broke one forbidden {b}!",
        "every dragon fears this {a}, for the {b} is its prophecy!",
        "i unleash that {a} with some {b}, kneel before me!",
        "no inferno can stop our {a} in any {b}, it was chosen!",
    ),
    "classical": (
        "lo, in the {b} thy {a} doth seek it.",
        "alas for the {a}, it hath no {b}.",
        "hark, the {a} and thine own {b}.",
        "verily the {a} was oft by the {b}.",
        "thou art the {a}, nay, the {b}.",
        "whence came this {a} to our {b}, quoth he.",
        "ere the night one {a} doth find its {b}.",
        "methinks every {a} loves the {b}, tis so.",
        "betwixt the {b} and that {a} there hath been peace.",
        "wherefore weeps some {a} in my {b}, forsooth.",
    ),
}
"""The first five are short enough for a model whose tokens are letters; in any order they read as one text."""

SHORT_SENTENCES = 5
