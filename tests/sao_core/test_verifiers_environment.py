import sys

import pytest

from sao_core.config import ConfigError
from sao_core.environments import get

SPEC = get("verifiers")


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        SPEC.tasks(SPEC.parse_options({"taskset": "my_taskset", **options}), 0)
    return str(caught.value)


@pytest.fixture
def bare_python(tmp_path):
    """This interpreter without its packages."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_missing_package_says_which_extra_brings_it(bare_python):
    assert refusal(python=bare_python) == (
        "environment.name `verifiers` needs a package that is not installed: pip install 'sao-pipeline[verifiers]', "
        f"or set environment.options.python to a Python that has it: got `{bare_python}`"
    )


def test_a_python_that_is_none_is_named(tmp_path):
    assert refusal(python=str(tmp_path / "none")) == (
        f"environment.options.python is not a program: got `{tmp_path / 'none'}`"
    )


def test_a_program_that_is_no_python_says_how_it_ended():
    assert "its process ended with exit code" in refusal(python="true")
