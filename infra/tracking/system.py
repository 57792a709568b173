"""What the machine of a run is busy with: MLflow's own collectors, sampled by the tracker's thread.

Points that MLflow does not take at once are dropped: they are worth nothing later, and the ledger does not hold them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from infra.tracking.client import Destination, points

SAMPLE_EVERY_S = 10.0


class SystemMetrics:
    """CPU, memory, disk, network and GPUs, as `system/…` metrics; a step is a second since the run was created."""

    def __init__(self, created_at: float) -> None:
        self._created_at = created_at
        self._due = 0.0
        self._collectors: list[Any] | None = None

    def due_in(self) -> float:
        """Seconds until there is something to do."""
        return max(0.0, self._due - time.monotonic())

    def send(self, there: Destination) -> None:
        """Sample and send, if it is time."""
        if self.due_in():
            return
        self._due = time.monotonic() + SAMPLE_EVERY_S
        if self._collectors is None:
            self._collectors = _collectors()
            return  # CPU and network are differences from the sample before, which this one is
        now = time.time()
        metrics: dict[str, float] = {}
        for collector in self._collectors:
            collector.clear_metrics()
            collector.collect_metrics()
            metrics |= {f"system/{key}": value for key, value in collector.aggregate_metrics().items()}
        some = points(metrics, step=max(0, round(now - self._created_at)), at=now)
        there.client.log_batch(there.run_id, metrics=some, synchronous=True)


def _collectors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    found[0].collect_metrics()
    with suppress(ImportError, RuntimeError):  # no driver or no GPU
        found.append(GPUMonitor())
    return found
