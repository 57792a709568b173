import subprocess
import sys

import pytest

from sao_core import environments
from sao_core.config import ConfigError
from sao_core.environments.base import load_object, random_of, shuffled_index


def test_unknown_environment_suggests_the_nearest():
    with pytest.raises(ConfigError) as caught:
        environments.get("calculater")
    assert "unknown environment.name `calculater`; did you mean `calculator`?" in str(caught.value)


@pytest.mark.parametrize("name", environments.names())
def test_built_in_environments_carry_their_own_name(name):
    assert environments.get(name).name == name


def test_an_environment_of_your_own_is_named_by_where_it_stands():
    assert environments.get("sao_core.environments.calculator:SPEC") is environments.get("calculator")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:SPEC", "names a module that cannot be imported: `no_such_module_here`"),
        ("sao_core.environments.calculator:SPEK", "module `sao_core.environments.calculator` has no `SPEK`"),
        ("sao_core.environments.calculator:WORDS", "must name an EnvironmentSpec: got dict"),
        (":SPEC", "must look like `module:attribute`: got `:SPEC`"),
    ],
)
def test_a_wrong_place_is_named(path, message):
    with pytest.raises(ConfigError, match=message):
        environments.get(path)


def test_objects_load_by_module_and_attribute():
    assert load_object("math:tau", "anything") == pytest.approx(6.283185307)


def test_unknown_option_names_environment_and_nearest_option():
    with pytest.raises(ConfigError) as caught:
        environments.get("calculator").parse_options({"max_operand_": 5})
    assert str(caught.value) == (
        "environment.options of `calculator`: unknown setting `max_operand_`; did you mean `max_operand`?"
    )


def test_every_epoch_is_another_permutation_and_positions_can_be_asked_in_any_order():
    walk = [shuffled_index(position, 5, "rows", 3) for position in range(15)]
    assert [sorted(walk[start : start + 5]) for start in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(walk[start : start + 5]) for start in (0, 5, 10)}) > 1
    assert shuffled_index(7, 5, "rows", 3) == walk[7]
    assert walk != [shuffled_index(position, 5, "rows", 4) for position in range(15)]


def test_random_numbers_depend_on_the_parts_alone():
    assert random_of("a", 1).random() == random_of("a", 1).random()
    assert random_of("a", 1).random() != random_of("a", 2).random()
    assert random_of("a", 12).random() != random_of("a1", 2).random()


def test_environments_need_no_torch():
    program = (
        "import sys, sao_core.environments as e; [e.get(n) for n in e.names()]; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
