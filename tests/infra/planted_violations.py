"""Violations to plant in the healthy run of `healthy_run`, and how it is put back to what it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import delete, insert, select, text

from infra.ledger import Ledger
from infra.ledger.database import Mode
from infra.models import Base
from infra.objects import ObjectStore
from infra.verify import Verification, verify

TABLES = [table for table in Base.metadata.sorted_tables if "run_id" in table.c]


@dataclass(frozen=True)
class Healthy:
    """A healthy run whose rows and objects can be put back after something was planted."""

    ledger: Ledger
    objects: ObjectStore
    run: str
    mlflow: Path
    rows: Mapping[str, list[dict[str, Any]]]
    files: Mapping[str, bytes]
    touched: set[str] = field(default_factory=set)
    """Keys of objects to put back."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object behind the ledger's back."""
        self.touched.add(key)
        self.objects.put(key, data, durable=False)

    def lose(self, key: str) -> None:
        """Delete an object behind the ledger's back."""
        self.touched.add(key)
        assert self.objects.exists(key)
        self.objects.delete(key)

    def sql(self, statement: str, **values: Any) -> None:
        """Change the ledger behind its back; `:run` is the run."""
        done = self.ledger.transact(
            lambda connection: connection.execute(text(statement), {"run": self.run} | values), Mode.WRITE
        )
        assert done.rowcount > 0, statement

    def key(self, number: int, attempt: int | None = None) -> str:
        """Object of an attempt of a request; default: of its last one."""
        rows = [row for row in self.rows["trajectories"] if row["request_number"] == number]
        wanted = attempt or max(row["attempt"] for row in rows)
        return str(next(row["object_key"] for row in rows if row["attempt"] == wanted))

    def policy_key(self, version: int, name: str) -> str:
        """A file of a policy."""
        return next(f"{r['object_key']}/{name}" for r in self.rows["policies"] if r["version"] == version)

    def checkpoint_key(self, step: int, name: str) -> str:
        """A file of a checkpoint."""
        return next(f"{r['object_key']}/{name}" for r in self.rows["checkpoints"] if r["step"] == step)

    def part_key(self, number: int) -> str:
        """Object of a part of an unfinished rollout."""
        return str(next(row["object_key"] for row in self.rows["rollout_parts"] if row["part"] == number))

    def part_id(self, number: int) -> int:
        """Row of a part of an unfinished rollout."""
        return int(next(row["part_id"] for row in self.rows["rollout_parts"] if row["part"] == number))

    def path(self, rest: str) -> str:
        return f"runs/{self.run}/{rest}"

    def verify(self, tracking_uri: str | None = None) -> Verification:
        return verify(self.ledger, self.objects, self.run, tracking_uri=tracking_uri)

    @classmethod
    def of(cls, ledger: Ledger, objects: ObjectStore, run: str, mlflow: Path) -> Healthy:
        """Remember a run as it is."""
        rows: dict[str, list[dict[str, Any]]] = {}

        def read(connection: Any) -> None:
            for table in TABLES:
                found = connection.execute(select(table).where(table.c.run_id == run))
                rows[table.name] = [dict(row._mapping) for row in found]

        ledger.transact(read, Mode.READ)
        return cls(ledger, objects, run, mlflow, rows, {key: objects.get(key) for key in objects.keys(f"runs/{run}")})

    def restore(self) -> None:
        def put_back(connection: Any) -> None:
            for table in TABLES:
                connection.execute(delete(table).where(table.c.run_id == self.run))
                if self.rows[table.name]:
                    connection.execute(insert(table), self.rows[table.name])

        self.ledger.transact(put_back, Mode.WRITE)
        for key in self.touched:
            if key in self.files:
                self.objects.put(key, self.files[key], durable=False)
            else:
                self.objects.delete(key)
        self.touched.clear()


@dataclass(frozen=True)
class Plant:
    """A violation: how it is made, which rule finds it, and what it names."""

    rule: str
    subject: str
    make: Callable[[Healthy], object]


def sql(rule: str, subject: str, *statements: str, **values: Any) -> Plant:
    """A violation in the ledger."""
    return Plant(rule, subject, lambda h: [h.sql(statement, **values) for statement in statements])


def state_of(number: int, **values: str) -> str:
    """A statement that changes the last attempt's rollout of a request."""
    changes = ", ".join(f"{name} = {value}" for name, value in values.items())
    return (
        f"UPDATE trajectories SET {changes} WHERE run_id = :run AND request_number = {number} AND attempt = "
        f"(SELECT max(attempt) FROM trajectories WHERE run_id = :run AND request_number = {number})"
    )


FAILED_9 = (
    "INSERT INTO failed_attempts (run_id, request_number, attempt, worker, reason, detail, failed_at) "
    "VALUES (:run, {}, {}, 'w', 'lost', 'lost', 0.0)"
)
REQUEST = "UPDATE requests SET {} WHERE run_id = :run AND number = {}"
STEP = "UPDATE updates SET {} WHERE run_id = :run AND NOT superseded AND step = {}"
POLICY = "UPDATE policies SET {} WHERE run_id = :run AND version = {}"
LEASED_13 = REQUEST.format("state = 'leased', attempts = 1, lease_worker = 'w', lease_until = 9e9", 13)
PARTS = "UPDATE rollout_parts SET {} WHERE run_id = :run"
PART = PARTS + " AND part = 1"
FIRST_ATTEMPT = "UPDATE trajectories SET {} WHERE run_id = :run AND request_number = {} AND attempt = 1"


PLANTS = {
    "a request is gone": sql("request-state", "request 13", "DELETE FROM requests WHERE run_id = :run AND number = 13"),
    "a request that nobody issued": sql(
        "request-state", "request 14", "UPDATE runs SET next_request = 14 WHERE run_id = :run"
    ),
    "a state that is none": sql("request-state", "request 13", REQUEST.format("state = 'parked'", 13)),
    "a done request is leased": sql(
        "request-state", "request 5", REQUEST.format("lease_worker = 'w', lease_until = 9e9", 5)
    ),
    "a lease of nobody": sql("request-state", "request 13", REQUEST.format("state = 'leased', lease_until = 9e9", 13)),
    "done, and nothing to show": sql("request-state", "request 13", REQUEST.format("state = 'done'", 13)),
    "done, and its rollout was refused": sql(
        "request-state", "request 12", state_of(12, state="'rejected'", reject_reason="'stale'")
    ),
    "waiting, and its rollout counts": sql("request-state", "request 6", REQUEST.format("state = 'pending'", 6)),
    "exhausted, and its rollout counts": sql("request-state", "request 6", REQUEST.format("state = 'exhausted'", 6)),
    "done by another attempt": sql("request-state", "request 6", REQUEST.format("attempts = 2", 6)),
    "too many attempts": sql("attempts", "request 10", REQUEST.format("attempts = 4", 10)),
    "exhausted too early": sql("attempts", "request 10", REQUEST.format("attempts = 2", 10)),
    "an attempt that vanished": sql(
        "attempts", "request 8", "DELETE FROM failed_attempts WHERE run_id = :run AND request_number = 8"
    ),
    "an attempt that vanished before the request was given up": sql(
        "attempts",
        "request 10",
        "DELETE FROM failed_attempts WHERE run_id = :run AND request_number = 10 AND attempt = 3",
    ),
    "an attempt that was never made": sql("attempts", "request 13", FAILED_9.format(13, 1)),
    "an attempt of no request": sql("attempts", "request 99", FAILED_9.format(99, 1)),
    "an attempt that failed and counts": sql("attempts", "request 6", FAILED_9.format(6, 1)),
    "a leased request without an attempt": sql(
        "attempts",
        "request 13",
        REQUEST.format("state = 'leased', attempts = 0, lease_worker = 'w', lease_until = 9e9", 13),
    ),
    "two attempts count": sql(
        "recorded-once", "request 7", FIRST_ATTEMPT.format("state = 'ready', reject_reason = NULL", 7)
    ),
    "a rollout in no state": sql("recorded-once", "{run}-12-1-0", state_of(12, state="'lost'")),
    "rejected without a reason": sql("recorded-once", "{run}-9-1-0", FIRST_ATTEMPT.format("reject_reason = NULL", 9)),
    "ready with a reason to be rejected": sql("recorded-once", "{run}-12-1-0", state_of(12, reject_reason="'stale'")),
    "trained by no step": sql("recorded-once", "{run}-6-1-0", state_of(6, trained_step="NULL")),
    "ready, and trained by a step": sql("recorded-once", "{run}-6-1-0", state_of(6, state="'ready'")),
    "kept instead of trained": sql("recorded-once", "{run}-12-1-0", state_of(12, state="'kept'")),
    "ready for a purpose that nothing trains on": sql("recorded-once", "{run}-2-1-0", state_of(2, state="'ready'")),
    "claimed by no step": sql("recorded-once", "{run}-12-1-0", state_of(12, state="'claimed'")),
    "a segment is gone": sql(
        "recorded-once",
        "request 5, attempt 1",
        "DELETE FROM trajectories WHERE run_id = :run AND request_number = 5 AND segment = 1",
    ),
    "a segment goes its own way": sql(
        "recorded-once",
        "request 5, attempt 1",
        "UPDATE trajectories SET state = 'ready', claimed_step = NULL, trained_step = NULL "
        "WHERE run_id = :run AND request_number = 5 AND segment = 1",
    ),
    "a rollout of no request": sql(
        "recorded-once", "{run}-12-1-0", "DELETE FROM requests WHERE run_id = :run AND number = 12"
    ),
    "trained by a step that did not survive": sql(
        "trained-once", "{run}-6-1-0", state_of(6, trained_step="7", claimed_step="7")
    ),
    "claimed for a step that is over": sql(
        "trained-once", "{run}-12-1-0", state_of(12, state="'claimed'", claimed_step="3")
    ),
    "claimed for a step that is far": sql(
        "trained-once", "{run}-12-1-0", state_of(12, state="'claimed'", claimed_step="6")
    ),
    "trained twice": sql(
        "trained-once",
        "request 7",
        FIRST_ATTEMPT.format("state = 'trained', reject_reason = NULL, claimed_step = 3, trained_step = 3", 7),
    ),
    "half a group trained": sql(
        "trained-once", "request 4", state_of(4, state="'ready'", claimed_step="NULL", trained_step="NULL")
    ),
    "a group trained in two steps": sql("trained-once", "group 7", state_of(4, claimed_step="2", trained_step="2")),
    "a group without one of its members": sql(
        "trained-once", "group 7", "DELETE FROM requests WHERE run_id = :run AND number = 4"
    ),
    "a step that trained more than it says": sql("step-accounts", "step 2", STEP.format("num_trajectories = 2", 2)),
    "a step that trained less than it says": sql(
        "step-accounts", "step 4", state_of(11, state="'ready'", claimed_step="NULL", trained_step="NULL")
    ),
    "a step is gone": sql(
        "gapless-steps", "step 3", "DELETE FROM updates WHERE run_id = :run AND step = 2 AND NOT superseded"
    ),
    "a step that starts from other weights": sql("gapless-steps", "step 4", STEP.format("version_before = 1", 4)),
    "a step that goes back": sql("gapless-steps", "step 4", STEP.format("version_after = 2", 4)),
    "a step whose policy is not there": sql("gapless-steps", "step 4", STEP.format("version_after = 5", 4)),
    "a step whose policy was undone": sql("gapless-steps", "step 2", POLICY.format("superseded = true", 3)),
    "a version is gone": sql(
        "gapless-versions", "policy 2", "DELETE FROM policies WHERE run_id = :run AND version = 2"
    ),
    "a parent that is not there": sql("gapless-versions", "policy 3", POLICY.format("parent_version = 7", 3)),
    "a parent that is younger": sql("gapless-versions", "policy 1", POLICY.format("parent_version = 3", 1)),
    "a policy without a parent": sql("gapless-versions", "policy 3", POLICY.format("parent_version = NULL", 3)),
    "a policy that descends from what was undone": sql(
        "gapless-versions", "policy 3", POLICY.format("parent_version = 2", 3)
    ),
    "a policy of a step that ended with another": sql("gapless-versions", "policy 3", POLICY.format("step = 3", 3)),
    "a policy without its manifest": Plant("weights", "policy 4", lambda h: h.lose(h.policy_key(4, "manifest.json"))),
    "a policy without its weights": Plant(
        "weights", "policy 4", lambda h: h.lose(h.policy_key(4, "model.safetensors"))
    ),
    "a damaged policy": Plant(
        "weights", "policy 3", lambda h: h.put(h.policy_key(3, "model.safetensors"), b"scratched")
    ),
    "a superseded policy that was not removed": Plant(
        "weights", "policy 2", lambda h: h.lose(h.policy_key(2, "manifest.json"))
    ),
    "another manifest": Plant(
        "weights", "checkpoint 4", lambda h: h.put(h.checkpoint_key(4, "manifest.json"), b"scratched")
    ),
    "a damaged checkpoint": Plant(
        "weights", "checkpoint 1", lambda h: h.put(h.checkpoint_key(1, "model.safetensors"), b"scratched")
    ),
    "a checkpoint of a step that was never made": sql(
        "weights", "checkpoint 9", "UPDATE checkpoints SET step = 9 WHERE run_id = :run AND step = 4"
    ),
    "an object is gone": Plant("objects", "{run}-11-1-0", lambda h: h.lose(h.key(11))),
    "a damaged object": Plant("objects", "{run}-11-1-0", lambda h: h.put(h.key(11), b"scratched")),
    "an object of a refused rollout is gone": Plant("objects", "{run}-7-1-0", lambda h: h.lose(h.key(7, attempt=1))),
    "another object than was recorded": Plant(
        "objects", "{run}-11-1-0", lambda h: h.put(h.key(11), h.objects.get(h.key(6)))
    ),
    "another hash than was recorded": sql("objects", "{run}-11-1-0", state_of(11, sha256=f"'{'0' * 64}'")),
    "a row that the object has not": sql("objects", "{run}-11-1-0", state_of(11, object_row="70")),
    "another score than was recorded": sql("objects", "{run}-11-1-0", state_of(11, score="0.5")),
    "other lengths than were recorded": sql("objects", "{run}-11-1-0", state_of(11, num_action_tokens="99")),
    "a part is gone": Plant("parts", "part {part}", lambda h: h.lose(h.part_key(1))),
    "a damaged part": Plant("parts", "part {part}", lambda h: h.put(h.part_key(1), b"scratched")),
    "a part in no state": sql("parts", "part {part}", PART.format("state = 'lost'")),
    "a part of no request": sql("parts", "part {part}", PART.format("request_number = 99")),
    "an open part of a request that was given up": sql("parts", "request 10", PARTS.format("state = 'open'")),
    "open parts of a completed run": sql(
        "parts",
        "request 13",
        REQUEST.format("state = 'pending'", 13),
        PARTS.format("state = 'open', request_number = 13"),
    ),
    "a gap between open parts": sql(
        "parts", "request 13", LEASED_13, PARTS.format("state = 'open', request_number = 13, part = 2 * part")
    ),
    "open parts of another attempt": sql(
        "parts", "request 13", LEASED_13, PARTS.format("state = 'open', request_number = 13, attempt = 3")
    ),
    "open parts from which nobody can go on": sql(
        "parts",
        "request 13",
        "UPDATE runs SET status = 'running' WHERE run_id = :run",
        REQUEST.format("state = 'pending'", 13),
        PARTS.format("state = 'open', request_number = 13"),
    ),
    "waiting in a completed run": sql("ended-run", "request 13", REQUEST.format("state = 'pending'", 13)),
    "claimed in a completed run": sql("ended-run", "{run}-12-1-0", state_of(12, state="'claimed'", claimed_step="5")),
    "ended and running": sql("ended-run", "{run}", "UPDATE runs SET status = 'running' WHERE run_id = :run"),
    "ended at no time": sql("ended-run", "{run}", "UPDATE runs SET ended_at = NULL WHERE run_id = :run"),
    "completed without an evaluation that was asked for": sql(
        "ended-run", "policy 0", "UPDATE evaluation_orders SET reported = false WHERE run_id = :run"
    ),
    "completed before its last step": Plant(
        "ended-run",
        "{run}",
        lambda h: h.sql(
            "UPDATE runs SET config_json = :config WHERE run_id = :run", config='{"learner": {"updates": 5}}'
        ),
    ),
}
