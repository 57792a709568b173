"""Writes functions and their visible tests as the files of a small repository."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sao_core.environments.code_repair.catalogue import Function
from sao_core.environments.code_repair.outcomes import Expected

TEST_FOLDER = "tests"


@dataclass(frozen=True)
class VisibleTest:
    """One test method, which makes one call."""

    number: int
    expected: Expected
    checks_arguments: bool
    """It also asserts that the arguments stayed as they were."""

    @property
    def name(self) -> str:
        """Name of the method."""
        return f"test_{self.expected.case.function}_{self.number}"


def source_path(module: str) -> str:
    """Where a module's source is."""
    return f"{module}.py"


def test_path(module: str) -> str:
    """Where a module's tests are."""
    return f"{TEST_FOLDER}/test_{module}.py"


def source_files(functions: Iterable[Function], changed: Mapping[str, str]) -> dict[str, str]:
    """The modules of some functions, which come with their helpers; ``changed`` is function → source to write instead.

    Within a module the order is the catalogue's, callees before callers.
    """
    modules: defaultdict[str, list[Function]] = defaultdict(list)
    for function in functions:
        modules[function.module].append(function)
    files = {}
    for module in sorted(modules):
        written = modules[module]
        imports = "".join(f"{line}\n" for line in sorted({line for f in written for line in f.imports}))
        parts = [changed.get(f.name, f.source).rstrip("\n") + "\n" for f in written]
        files[source_path(module)] = "\n\n".join([imports, *parts] if imports else parts)
    return files


def test_files(tests: Sequence[VisibleTest], modules: Mapping[str, str]) -> dict[str, str]:
    """The test files of some modules; ``modules`` is function → module."""
    by_module: defaultdict[str, list[VisibleTest]] = defaultdict(list)
    for test in tests:
        by_module[modules[test.expected.case.function]].append(test)
    return {test_path(module): _test_file(module, by_module[module]) for module in sorted(by_module)}


def _test_file(module: str, tests: Sequence[VisibleTest]) -> str:
    names = ", ".join(sorted({test.expected.case.function for test in tests}))
    title = module.title().replace("_", "")
    methods = "\n".join(_method(test) for test in tests)
    return f"import unittest\n\nfrom {module} import {names}\n\n\nclass {title}Test(unittest.TestCase):\n{methods}"


def _method(test: VisibleTest) -> str:
    case = test.expected.case
    call = f"{case.function}({', '.join(map(repr, case.arguments))})"
    if test.expected.raises:
        lines = [f"with self.assertRaises({test.expected.raises}):", f"    {call}"]
    elif test.checks_arguments:
        lines = [
            f"arguments = {case.arguments!r}",
            f"self.assertEqual({case.function}(*arguments), {test.expected.value!r})",
            f"self.assertEqual(arguments, {case.arguments!r})",
        ]
    elif isinstance(test.expected.value, float):
        lines = [f"self.assertAlmostEqual({call}, {test.expected.value!r})"]
    else:
        lines = [f"self.assertEqual({call}, {test.expected.value!r})"]
    return f"    def {test.name}(self):\n" + "".join(f"        {line}\n" for line in lines)
