"""A run whose disk fills up and gets room again, on a tmpfs: `unshare -rm python full_disk.py FOLDER PREFECT_API`.

Prints as JSON how the filled run ended (exit code, output), how the resumed one did, and what `sao verify` would find.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from short_run import FASTEST, Home

from infra.objects import ObjectStore
from infra.verify import verify

DISK = "96m"
UPDATES = 12


def fill(folder: Path) -> Path:
    """Leave not a byte free where ``folder`` is."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def main(folder: Path, prefect_api: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    home = Home(folder, {"PREFECT_API_URL": prefect_api})
    process = home.train(*FASTEST, f"learner.updates={UPDATES}", "rollout.workers=1")
    run_id = home.wait_for_step(process, 3)
    ballast = fill(folder)
    stdout, stderr = process.communicate(timeout=240)
    full = {"exit": process.returncode, "stdout": stdout, "stderr": stderr}
    ballast.unlink()
    resumed = home.sao("train", "--resume", run_id)
    found = verify(
        home.ledger(), ObjectStore.from_settings(home.settings), run_id, tracking_uri=home.settings.tracking_uri
    )
    report = {
        "run_id": run_id,
        "full": full,
        "resumed": {"exit": resumed.returncode, "stdout": resumed.stdout, "stderr": resumed.stderr},
        "step": home.ledger().run(run_id).step,
        "violations": [str(violation) for violation in found.violations],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
