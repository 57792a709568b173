"""The page of a trajectory in a browser: from a file, without a network, in light and dark, on a desk and a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chromium import PATIENCE_MS, WINDOW
from pictures import Pictures
from playwright.sync_api import Browser, expect
from runs import Started
from watched import Watched

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def file(finished: Started, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a rollout that a late update trained on, as `sao trajectory ID --html` writes it."""
    ledger = finished.up.home.ledger()
    rows = ledger.trajectories(finished.run_id, step=ledger.last_step(finished.run_id))
    row = max(rows, key=lambda row: (row.num_turns, row.score))
    file = tmp_path_factory.mktemp("viewer") / "rollout.html"
    done = finished.up.home.sao("trajectory", row.trajectory_id, str(file), "--html")
    assert done.returncode == 0, done.stderr
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", [WINDOW, PHONE], ids=["desk", "phone"])
def test_a_trajectory_can_be_read_and_its_tokens_examined(
    browser: Browser, file: Path, scheme: str, window: dict[str, int], pictures: Pictures
):
    context = browser.new_context(viewport=window, color_scheme=scheme, has_touch=window is PHONE)
    context.set_default_timeout(PATIENCE_MS)
    watched = Watched(context.new_page())
    page = watched.page
    page.goto(file.as_uri())
    for role in ("user", "assistant"):
        page.get_by_role("heading", name=re.compile(f"^{role}")).first.wait_for()
    brightness = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    assert (brightness > 600) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth") <= window["width"]

    page.get_by_role("radio", name="Log-prob").check()
    token = page.locator("[data-i].odd").first
    expect(token).to_be_visible()
    plain = token.evaluate("token => getComputedStyle(token).backgroundColor")
    page.get_by_role("radio", name="None").check()
    assert token.count() == 0 or token.evaluate("token => getComputedStyle(token).backgroundColor") != plain
    page.get_by_role("radio", name="Advantage").check()

    page.locator("section.policy [data-i]").first.click()
    expect(page.get_by_label("Numbers of a token")).to_contain_text("advantage")
    expect(page.get_by_label("Numbers of a token")).to_contain_text("ratio")
    where = "phone" if window is PHONE else "desk"
    if (where, scheme) in {("desk", "light"), ("phone", "dark")}:
        pictures.take(page, f"viewer-{where}-{scheme}")

    assert [url for url in watched.requests if not url.startswith("file:")] == []
    assert watched.errors == []
    context.close()
