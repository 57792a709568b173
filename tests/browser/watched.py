"""A page and everything that text which became code would do in it."""

from __future__ import annotations

from attacks import FLAG
from playwright.sync_api import Dialog, Page, Request


class Watched:
    """Follows one tab from its first page on."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.dialogs: list[str] = []
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("dialog", self._dialog)
        page.on("request", self._request)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        self.requests.append(request.url)

    def nothing_was_executed(self) -> None:
        """Assert that hostile text stayed text, here and in every frame."""
        assert not self.dialogs
        assert not [url for url in self.requests if url.endswith(f"/{FLAG}")]
        for frame in self.page.frames:
            assert frame.evaluate(f"window.{FLAG}") is None, frame.url
            links = frame.locator("a[href^='javascript:' i]")
            assert links.count() == 0, links.first.evaluate("link => link.outerHTML")
