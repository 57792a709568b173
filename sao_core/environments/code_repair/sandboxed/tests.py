"""Runs test files and writes down what came of each test; whether that can be trusted is not known here.

Reads one line: {"files": [path, …], "runner": "unittest" or "pytest", "token": text}. Answers one line per test, as
soon as it is done: [token, test, problem], where no problem is "", and at the end [token, "", ""].
"""

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any

Report = Callable[[str, str], None]
"""Name of a test and its problem."""


def problem(error: BaseException) -> str:
    """An exception in one line that is the same every time: no places in memory."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def path_of_modules() -> None:
    """Look for modules in the candidate's folder after the standard library, and before installed packages."""
    places = [place for place, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))]
    sys.path.insert(min(places, default=len(sys.path)), os.getcwd())


def load(path: str) -> ModuleType:
    """Import a test file by its path."""
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.getcwd(), path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Results(unittest.TestResult):
    """Reports each test of a file once."""

    def __init__(self, path: str, report: Report) -> None:
        super().__init__()
        self.path, self.report = path, report
        self.current = ""

    def startTest(self, test: unittest.TestCase) -> None:
        """Nothing is wrong yet."""
        self.current = ""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """A test raised, or its class's set-up did."""
        self._failed(test, err[1])

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """An assertion failed."""
        self._failed(test, err[1])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        """A part of a test ended."""
        if err is not None:
            self.current = self.current or problem(err[1])

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """A test that was skipped has not passed."""
        self.current = f"skipped: {reason}"

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        """A test passed that was expected to fail."""
        self.current = "unexpected success"

    def stopTest(self, test: unittest.TestCase) -> None:
        """Tell what came of it."""
        self.report(f"{self.path}::{type(test).__name__}::{test._testMethodName}", self.current)

    def _failed(self, test: unittest.TestCase, error: BaseException) -> None:
        if isinstance(test, unittest.TestCase):
            self.current = self.current or problem(error)
        else:
            self.report(f"{self.path}::{test}", problem(error))


def run_functions(path: str, module: ModuleType, report: Report) -> None:
    """Run the test functions of a file that take no arguments."""
    for name, function in sorted(vars(module).items()):
        if name.startswith("test") and inspect.isfunction(function) and not inspect.signature(function).parameters:
            try:
                came = function()
                if inspect.iscoroutine(came):
                    import asyncio  # takes as long as the rest of a short run

                    asyncio.run(came)
            except BaseException as error:  # SystemExit fails a test as anything else does
                report(f"{path}::{name}", problem(error))
            else:
                report(f"{path}::{name}", "")


def run_unittest(path: str, report: Report) -> None:
    """Run a file's test cases and test functions."""
    try:
        module = load(path)
        suite = unittest.defaultTestLoader.loadTestsFromModule(module)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            suite.run(Results(path, report))
            run_functions(path, module, report)
    except BaseException as error:
        report(path, problem(error))


def run_pytest(files: list[str], report: Report) -> None:
    """Run the files under pytest, without the candidate's settings, plug-ins or caches."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    class Reporter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or not report.passed:
                name = report.nodeid.removeprefix("./")
                text = "" if report.passed else f"{report.outcome}: {_crash(report)}"
                tell(name, text)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                tell(report.nodeid, str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip())

    tell = report
    options = ["-p", "no:cacheprovider", "-p", "no:terminal", "-c", os.devnull, "--rootdir", os.getcwd()]
    pytest.main([*options, *files], plugins=[Reporter()])


def _crash(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0]) if lines else ""


def main() -> None:
    """Run what standard input asks for; the tests get none of the standard streams."""
    request = json.loads(sys.stdin.readline())
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    path_of_modules()
    dumps, write, token = json.dumps, os.write, request["token"]

    def report(test: str, text: str) -> None:
        write(answers, (dumps([token, test, text[:1000]]) + "\n").encode())

    if request["runner"] == "pytest":
        run_pytest(request["files"], report)
    else:
        for path in request["files"]:
            run_unittest(path, report)
    report("", "")
    os._exit(0)


if __name__ == "__main__":
    main()
