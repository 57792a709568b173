"""What a rig is told, where it keeps its things, and the log that its processes leave beside the system under test."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.ledger import Ledger
from infra.objects import ObjectStore


@dataclass(frozen=True)
class Plan:
    """One run of the rig, as JSON for the process that is its supervisor."""

    seed: int
    folder: str
    database_url: str
    object_store: str
    endpoint_url: str | None = None
    kills: int = 0
    """How many deaths the members shall die at named points; 0: it goes on until `calm` is asked for from outside."""
    points: tuple[str, ...] = ()
    """Only these points, by name; empty: all of them."""
    stalls: bool = False
    """Nobody is killed: learners stall at points, `kills` times, and go on after the run was resumed elsewhere."""
    workers: int = 3
    group_size: int = 1
    batch_size: int = 4
    lease_s: float = 1.2
    silent_s: float = 1.0
    """A worker that was silent for so long counts as dead when policies are removed."""
    calm_steps: int = 3
    limit_s: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)
    fill_disk: bool = False
    """The disk of the object store fills up once; nobody is killed."""
    disk_mb: int = 0
    """The size of a disk of its own for the object store; 0: it has none, and `fill_disk` lets writes fail."""

    run_id = "chaos"

    @classmethod
    def load(cls, text: str) -> Plan:
        """The inverse of `dump`."""
        values = json.loads(text)
        return cls(**values | {"points": tuple(values["points"])})

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    def path(self, name: str) -> Path:
        """A file or folder of the rig's own."""
        return Path(self.folder) / name

    @property
    def calm(self) -> Path:
        """Once this file is there nobody is killed any more, and the learner ends after `calm_steps` steps."""
        return self.path("calm")

    def open_ledger(self) -> Ledger:
        """A ledger of the calling process."""
        return Ledger(self.database_url)

    def open_objects(self) -> ObjectStore:
        """An object store of the calling process."""
        return ObjectStore(self.object_store, endpoint_url=self.endpoint_url)

    def say(self, what: str, **more: Any) -> None:
        """Append one line to the side log, in one write, which a kill cannot tear."""
        line = json.dumps({"what": what, "pid": os.getpid(), **more}) + "\n"
        descriptor = os.open(self.path("side.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def said(self, what: str) -> Iterator[dict[str, Any]]:
        """The lines of one kind in the side log."""
        if self.path("side.log").exists():
            for line in self.path("side.log").read_text().splitlines():
                entry = json.loads(line)
                if entry["what"] == what:
                    yield entry
