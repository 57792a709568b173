import difflib
import textwrap

import pytest

from sao_core.environments.code_repair import catalogue
from sao_core.environments.code_repair.mutants import mutants_of
from sao_core.environments.code_repair.outcomes import Case
from sao_core.environments.code_repair.trials import DoesNotEnd, Program

FIRST_WORDS = textwrap.dedent(
    '''
    def first_words(text: str, limit: int) -> list[str]:
        """Not mutated: 3 < 4 and text[1:]."""
        found = []
        if limit < 1:
            return found
        for word in sorted(text.split(" "), key=len):
            if word and len(found) < limit + 1:
                found.append(word)
            else:
                break
        count = len(found) - 1
        return found[:count]
    '''
).lstrip()


def changes(source):
    """Kind → what the mutants of that kind read instead."""
    found = {}
    for mutant in mutants_of(source):
        lines = difflib.ndiff(source.splitlines(), mutant.source.splitlines())
        found.setdefault(mutant.kind, []).append([line[2:].strip() for line in lines if line[0] == "+"])
    return found


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("off by one", "if limit <= 1:"),
        ("off by one", "if limit < 2:"),
        ("off by one", "if word and len(found) < limit:"),
        ("off by one", "if word and len(found) < limit + 2:"),
        ("wrong comparison", "if limit > 1:"),
        ("wrong operator", "if word or len(found) < limit + 1:"),
        ("wrong operator", "count = len(found) + 1"),
        ("lost condition", "if len(found) < limit + 1:"),
        ("inverted condition", "if not (word and len(found) < limit + 1):"),
        ("wrong variable", "found.append(found)"),
        ("wrong function", "found.extend(word)"),
        ("wrong separator", 'for word in sorted(text.split(""), key=len):'),
        ("lost argument", 'for word in sorted(text.split(" ")):'),
        ("wrong slice", "return found[count:]"),
        ("wrong slice", "return found[:count - 1]"),
        ("early continue", "continue"),
        ("mutable default", "def first_words(text: str, limit: int, found=[]) -> list[str]:"),
    ],
)
def test_a_mistake_of_each_kind_is_made_in_the_text(kind, line):
    assert [line] in changes(FIRST_WORDS)[kind]


def test_lines_are_lost_and_moved_with_their_blocks():
    found = changes(FIRST_WORDS)
    assert found["missing else"] == found["missing return"] == found["lost edge case"] == [[]]
    lost = "    if limit < 1:\n        return found\n"
    assert FIRST_WORDS.replace(lost, "") in [m.source for m in mutants_of(FIRST_WORDS) if m.kind == "lost edge case"]


def test_annotations_and_docstrings_are_no_place_for_a_mistake():
    head = FIRST_WORDS.split("\n")[1]
    signatures = {mutant.source.split("\n")[0] for mutant in mutants_of(FIRST_WORDS)}
    assert all(head in mutant.source for mutant in mutants_of(FIRST_WORDS))
    assert signatures == {
        "def first_words(text: str, limit: int) -> list[str]:",
        "def first_words(text: str, limit: int, found=[]) -> list[str]:",
    }


def test_mutants_differ_from_the_function_and_from_each_other():
    for function in list(catalogue.functions().values())[::9]:
        sources = [mutant.source for mutant in mutants_of(function.source)]
        assert len({*sources, function.source}) == len(sources) + 1


@pytest.mark.parametrize(
    "body",
    ["while True:\n        n += 1", "x = [n]\n    for i in x:\n        x.extend(x)", "for i in f(n):\n        pass"],
    ids=["a loop", "a list that doubles", "a recursion"],
)
def test_what_never_ends_is_stopped(body):
    running = Program([f"def f(n):\n    {body}\n"])
    try:
        outcome = running.call(Case("f", (1,)))
    except DoesNotEnd:
        return
    assert outcome.raised[0] == "RecursionError"


def test_a_default_that_is_kept_between_calls_shows_in_the_second_call():
    running = Program(["def f(n, kept=[]):\n    kept.append(n)\n    return kept\n"])
    assert [running.call(Case("f", (n,))).value for n in (1, 2)] == [[1], [1, 2]]
