from pathlib import Path

from flows.settings_page import settings_page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_settings_page_is_current():
    """Renew it with: sao settings > docs/settings.md"""
    assert PAGE.read_text() == settings_page()


def test_the_page_names_defaults_and_environment_options():
    page = settings_page()
    assert "| `algorithm.eps_high` | `5.0` |" in page
    assert "## environment.options of `calculator`" in page
