"""A real browser (Chromium, headless) on a real `sao up`: one of each for all tests of this folder.

A failed test leaves a picture and the text of its page in pytest's temporary folder, and says where. With
`--screenshots FOLDER` the tests write the pictures of the docs, of runs that are long enough to show something.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from chromium import PATIENCE_MS, WINDOW, launch
from installation import Installation, installed
from pictures import Pictures
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from prefect_form import Form
from runs import HOSTILE, LEARNS, QUICK, Started
from watched import Watched


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, default=None, help="write the pictures of the docs there")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        chromium = launch(playwright)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with installed(tmp_path_factory.mktemp("up"), {"PYTHONPATH": here}) as installation:
        yield installation


@pytest.fixture(scope="session")
def person(browser: Browser) -> Iterator[BrowserContext]:
    """One person's browser: what it keeps (caches, choices) lasts from page to page."""
    context = browser.new_context(viewport=WINDOW, color_scheme="light", locale="en-GB", timezone_id="UTC")
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def page(person: BrowserContext, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Page]:
    """A tab, and what is left of it when a test fails."""
    tab = person.new_page()
    yield tab
    report = request.node.stash.get(REPORT, None)
    if report is not None and report.failed and not tab.is_closed():
        tab.screenshot(path=tmp_path / "page.png", full_page=True)
        (tmp_path / "page.txt").write_text(f"{tab.url}\n\n{tab.locator('body').inner_text()}")
        report.sections.append(("the page", f"{tmp_path}/page.png and page.txt"))
    tab.close()


@pytest.fixture
def watched(page: Page) -> Watched:
    """The tab, with an account of everything that hostile text would do in it."""
    return Watched(page)


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Pictures:
    return Pictures(request.config.getoption("--screenshots"))


@pytest.fixture(scope="session")
def settings(pictures: Pictures) -> Mapping[str, str]:
    """What to type into the form: a run that is over soon, or for the docs one that learns."""
    return LEARNS if pictures.wanted else QUICK


@pytest.fixture(scope="session")
def started(up: Installation, person: BrowserContext, settings: Mapping[str, str], pictures: Pictures) -> Started:
    """A run that was started by filling in its form."""
    tab = person.new_page()
    form = Form.open(tab, up.prefect, "tiny")
    for name, value in settings.items():
        form.set(name, value)
    form.show("learner.updates")
    pictures.take(tab, "form-filled")
    with tab.expect_response("**/create_flow_run") as answer:
        form.submit()
    created = answer.value.json()
    assert "id" in created, created
    flow_run = created["id"]
    tab.close()
    return Started(up, flow_run)


@pytest.fixture(scope="session")
def finished(started: Started) -> Started:
    ended = started.up.wait(started.flow_run, timeout_s=600)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    return started


@pytest.fixture(scope="session")
def hostile(finished: Started) -> Started:
    """A second run of the same recipe, started by API, whose prompts, observations and labels attack who reads them."""
    second = Started(finished.up, finished.up.train(*HOSTILE))
    ended = finished.up.wait(second.flow_run, timeout_s=600)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    return second


@pytest.fixture(scope="session")
def second(request: pytest.FixtureRequest, finished: Started, pictures: Pictures) -> Started:
    """Another run of the same recipe, of another algorithm, to compare with."""
    if not pictures.wanted:
        hostile: Started = request.getfixturevalue("hostile")
        return hostile
    grpo = (*(f"{name}={value}" for name, value in LEARNS.items()), "algorithm.name=grpo")
    other = Started(finished.up, finished.up.train(*grpo))
    assert other.up.wait(other.flow_run, timeout_s=600)["state"]["type"] == "COMPLETED"
    return other


REPORT = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[REPORT] = report
    return report
