"""What a process of many threads frees goes back to the system."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
import psutil
from infra import allocator

allocator.TRIM_EVERY_S = 0.2
{lean}
kept = []
go_on = threading.Event()

def work():
    blocks = [bytearray(50_000) for _ in range(200)]  # below the size that the system gives page by page
    kept.append(blocks[-1])  # what lies above the freed blocks, so that they cannot go back by themselves
    del blocks
    go_on.wait()  # a thread that lives keeps its pool

threads = [threading.Thread(target=work, daemon=True) for _ in range(16)]
for thread in threads:
    thread.start()
while len(kept) < 16:
    time.sleep(0.01)
time.sleep(1.0)
print(psutil.Process().memory_info().rss / 2**20)
"""


def resident_mb(lean: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(lean=lean)], check=True, capture_output=True, text=True, timeout=60
    )
    return float(done.stdout)


def test_freed_memory_of_many_threads_is_given_back() -> None:
    assert resident_mb("allocator.keep_lean()") < resident_mb("") - 40.0
