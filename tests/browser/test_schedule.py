"""A schedule that is switched on in the Prefect UI is on, and stays on."""

from __future__ import annotations

from installation import Installation, wait_for
from pictures import Pictures
from playwright.sync_api import Page, expect
from short_run import Home


def test_the_nightly_schedule_is_switched_on_and_later_starts_leave_it_on(
    up: Installation, page: Page, pictures: Pictures
):
    def schedule() -> dict[str, object]:
        nightly = up.call("GET", "/deployments/name/adapt/nightly")
        (only,) = up.call("GET", f"/deployments/{nightly['id']}/schedules")
        return dict(only)

    assert schedule()["active"] is False
    page.goto(f"{up.prefect}/v2/deployments")
    page.get_by_role("link", name="nightly", exact=True).click()
    switch = page.get_by_role("complementary").get_by_role("switch")
    expect(switch).not_to_be_checked()
    switch.click()
    expect(switch).to_be_checked()
    wait_for(lambda: schedule()["active"], 20, lambda: str(schedule()))
    pictures.take(page, "schedule")
    home = Home(up.home.folder, {**up.home.variables, "PREFECT_API_URL": f"{up.prefect}/api"})
    again = home.sao("bootstrap", "--working-dir", str(home.folder))  # as a later `sao up` does
    assert again.returncode == 0, again.stderr
    assert schedule()["active"] is True
    page.reload()
    expect(switch).to_be_checked()
