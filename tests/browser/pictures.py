"""Pictures of pages for the docs, small enough to keep in the repository."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page

MOST_BYTES = 120_000
COLOURS = 128


class Pictures:
    """Takes pictures if somebody wants them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def wanted(self) -> bool:
        return self._folder is not None

    def take(self, page: Page, name: str, **options: Any) -> None:
        """Write `ui-NAME.png` with a palette; ``options`` are those of Playwright's `screenshot`."""
        if self._folder is None:
            return
        page.wait_for_timeout(700)  # what fades in is there
        image = Image.open(io.BytesIO(page.screenshot(animations="disabled", **options))).convert("RGB")
        target = self._folder / f"ui-{name}.png"
        image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(target, optimize=True)
        assert target.stat().st_size <= MOST_BYTES, f"{target} has {target.stat().st_size} bytes"
