"""Text that would run code where it is taken for markup."""

from __future__ import annotations

FLAG = "executed"
"""What hostile text does: it opens a dialog, sets this on the window, and asks for an address that ends in it."""

ATTACK = f"window.{FLAG}=1;alert(1);fetch('/{FLAG}')"
ATTACKS = (
    f'<img src=x onerror="{ATTACK}">',
    f"<script>{ATTACK}</script>",
    f"</script><script>{ATTACK}</script>",
    f'<svg onload="{ATTACK}">',
    f"[click](javascript:{ATTACK})",
    f'```\n<img src=y onerror="{ATTACK}">\n```',
    f'"><iframe srcdoc="<script>parent.{FLAG}=1</script>"></iframe>',
)
