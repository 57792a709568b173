"""Debian's Chromium, headless."""

from __future__ import annotations

import os
import shutil

import pytest
from playwright.sync_api import Browser, Playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WINDOW = {"width": 1280, "height": 800}
PATIENCE_MS = 60_000
"""Longest that a page may take to show what is waited for, on a machine that trains meanwhile."""


def launch(playwright: Playwright) -> Browser:
    """Start it so that it reaches nothing but this machine; without one, fail with the way to get it."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.fail("there is no Chromium here; on Debian: sudo apt-get install chromium", pytrace=False)
    flags = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # as root it starts in no other way
    return playwright.chromium.launch(executable_path=program, args=flags)
