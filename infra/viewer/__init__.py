"""One trajectory for people: as data (`trajectory_view`), and as one page that needs nothing else (`trajectory_page`).

Nothing here changes what is stored, and the page loads nothing from anywhere.
"""

from infra.viewer.page import trajectory_page
from infra.viewer.view import trajectory_view
from infra.viewer.visible import visible

__all__ = ["trajectory_page", "trajectory_view", "visible"]
