"""The form of a deployment in Prefect's UI, by the names of its settings."""

from __future__ import annotations

from playwright.sync_api import Locator, Page


class Form:
    """The page behind Run → Custom run."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @staticmethod
    def open(page: Page, prefect: str, deployment: str) -> Form:
        """Click the way that people take to it."""
        page.goto(f"{prefect}/v2/deployments")
        page.get_by_role("link", name=deployment, exact=True).click()
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Custom run").click()
        page.get_by_role("heading", name="Parameters").wait_for()
        form = Form(page)
        form.field("").wait_for()
        return form

    def field(self, name: str) -> Locator:
        """The part of the form that shows a setting or section of `config`, e.g. `policy.lr`."""
        found = self._part(self.page.locator("main"), "config")
        for part in filter(None, name.split(".")):
            found = self._part(found, f"{part} (Optional)")
        return found

    @staticmethod
    def _part(within: Locator, label: str) -> Locator:
        heading = within.get_by_text(label, exact=True).first
        return heading.locator("xpath=ancestor::div[.//button][1]/..")

    def label_order(self) -> list[str]:
        """Labels of all settings and sections, from top to bottom."""
        labels = self.field("").locator("label").all_inner_texts()
        return [label.removesuffix(" (Optional)") for label in labels if label.endswith(" (Optional)")]

    def value(self, name: str) -> str:
        """What a field of text or numbers shows."""
        return self.field(name).get_by_role("textbox").or_(self.field(name).get_by_role("spinbutton")).input_value()

    def choices(self, name: str) -> list[str]:
        """What a setting offers to choose from."""
        self._choice(name).click()
        self.page.get_by_role("option").first.wait_for()
        offered = self.page.get_by_role("option").all_inner_texts()
        self.page.keyboard.press("Escape")
        self._closed()
        return offered

    def set(self, name: str, value: str) -> None:
        """Change a setting as its kind of field wants it."""
        field = self.field(name)
        if value in ("true", "false"):
            field.get_by_role("switch").set_checked(value == "true")
        elif self._choice(name).count():
            self._choice(name).click()
            self.page.get_by_role("option", name=value, exact=True).click()
            self._closed()
        elif field.get_by_role("spinbutton").count():
            field.get_by_role("spinbutton").fill(value)
        else:
            textbox = field.get_by_role("textbox")
            textbox.click()
            textbox.press("ControlOrMeta+A")
            self.page.keyboard.insert_text(value)
            self.page.wait_for_timeout(500)  # the editor of JSON tells the form a moment later

    def show(self, name: str) -> None:
        """Scroll a setting into view."""
        self.field(name).scroll_into_view_if_needed()

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit", exact=True).click()

    def _closed(self) -> None:
        """Wait until a list of choices has faded out, or the next one would be mistaken for it."""
        self.page.get_by_role("option").first.wait_for(state="detached")

    def _choice(self, name: str) -> Locator:
        return self.field(name).get_by_role("button", name=f"Select {name.rpartition('.')[2]}", exact=True)
