import doctest
import importlib
import sys

import pytest

from sao_core.environments.base import random_of
from sao_core.environments.code_repair import catalogue
from sao_core.environments.code_repair.outcomes import Case
from sao_core.environments.code_repair.trials import program

FUNCTIONS = catalogue.functions()


@pytest.mark.parametrize("module", catalogue.MODULES)
def test_every_function_does_what_its_examples_say(module):
    loaded = importlib.import_module(f"{catalogue.__name__}.{module}")
    assert all(entry.function.__doc__.count(">>>") for entry in loaded.ENTRIES)
    assert doctest.testmod(loaded).failed == 0


def test_names_are_unique_and_shadow_nothing_of_the_standard_library():
    loaded = [importlib.import_module(f"{catalogue.__name__}.{module}") for module in catalogue.MODULES]
    assert len(FUNCTIONS) == sum(len(module.ENTRIES) for module in loaded) >= 110
    assert not set(catalogue.MODULES) & sys.stdlib_module_names


def test_held_out_functions_share_no_function_with_those_trained_on():
    assert FUNCTIONS.keys() >= catalogue.HELD_OUT
    held_out, trained = (
        {f.name for function in catalogue.pool(held_out) for f in (function, *function.helpers)}
        for held_out in (True, False)
    )
    assert not held_out & trained
    assert len(held_out) == 31
    assert {function.module for function in catalogue.pool(True)} == set(catalogue.MODULES)


@pytest.mark.parametrize("module", catalogue.MODULES)
def test_functions_leave_their_arguments_alone_and_raise_only_what_they_document(module):
    for function in (f for f in FUNCTIONS.values() if f.module == module):
        rng, running = random_of("draws", function.name), program([function])
        outcomes = [running.call(Case(function.name, function.entry.draw(rng))) for _ in range(40)]
        assert not any(outcome.changed_arguments for outcome in outcomes), function.name
        for outcome in outcomes:
            assert not outcome.raised or f"Raises {outcome.raised[0]}" in function.source, (function.name, outcome)


def test_inputs_are_varied_enough_that_hidden_ones_are_unlike_those_seen():
    for function in FUNCTIONS.values():
        rng = random_of("variety", function.name)
        assert len({repr(function.entry.draw(rng)) for _ in range(80)}) >= 30, function.name
