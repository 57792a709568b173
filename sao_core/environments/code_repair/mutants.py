"""Wrong versions of a function: one realistic mistake each, no two with the same text.

Whether a mutant still is Python, ends and differs from the function is for whoever runs it to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

from sao_core.environments.code_repair.edits import Edit, Source
from sao_core.environments.code_repair.expression_mistakes import expression_mistakes
from sao_core.environments.code_repair.statement_mistakes import statement_mistakes


@dataclass(frozen=True)
class Mutant:
    """A function with one mistake in it."""

    kind: str
    source: str


@cache
def mutants_of(source: str) -> tuple[Mutant, ...]:
    """All mutants of the function ``source``, in a fixed order."""
    return tuple(_mutants(source))


def _mutants(text: str) -> Iterator[Mutant]:
    source = Source(text)
    seen = {text}
    edits: Iterator[Edit] = chain(expression_mistakes(source), statement_mistakes(source))
    for edit in edits:
        changed = source.applied(edit)
        if changed in seen:
            continue
        seen.add(changed)
        yield Mutant(edit.kind, changed)
