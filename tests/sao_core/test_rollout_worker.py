"""The rollout loop with in-memory ports, a real engine and a small environment."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rollout_fixtures import full_forward, letter_tokenizer, request, small_model

from sao_core.config import Section, TrainConfig, parse_config
from sao_core.environments.base import Environment, EnvironmentSpec, StepResult, Task
from sao_core.models.policy import save_policy
from sao_core.protocols import Rollout, RolloutRequest
from sao_core.rollout.parts import RolloutPart, join
from sao_core.rollout.transformers_engine import start_transformers_engine
from sao_core.rollout.worker import WorkerStats, run_worker
from sao_core.trajectory import Message, Outcome, Purpose, Role, validate_rollout

TOKENIZER = letter_tokenizer()
VERSIONS = (1, 2, 3)


def policy(version: int) -> Any:
    return small_model(version, vocabulary=len(TOKENIZER), spread=0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("policies")
    for version in VERSIONS:
        save_policy(policy(version), TOKENIZER, root / str(version))
    return {version: root / str(version) for version in VERSIONS}


class TwoTurns(Environment):
    """Asks, answers once, and pays 1 after the second turn; what the task's key says goes wrong or takes long."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    waiting = 0
    """Steps that will never return."""

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self.key = task.key
        if "unborn" in self.key:
            raise RuntimeError("no sandbox")
        return (Message(Role.USER, "abcdefghij"[: 1 + len(self.key) % 8]),)

    async def step(self, action: str) -> StepResult:
        self.turn += 1
        if "endless" in self.key:
            TwoTurns.waiting += 1
            await asyncio.Event().wait()
        if "slow" in self.key:
            await asyncio.sleep(0.4)
        if "broken" in self.key:
            raise RuntimeError("sandbox lost")
        return StepResult((Message(Role.TOOL, "de"),), float(self.turn == 2), terminated=self.turn == 2)

    def state(self) -> Any:
        return self.turn

    async def restore(self, task: Task, state: Any) -> None:
        if "lost" in task.key:
            raise RuntimeError("sandbox lost")
        self.key, self.turn = task.key, state


class Tasks:
    asked, answer = threading.Event(), threading.Event()

    def task(self, key: str) -> Task:
        if key == "unknown":
            raise KeyError(key)
        if key == "unanswered":
            self.asked.set()
            self.answer.wait(20)
        return Task(key, "")


SPEC = EnvironmentSpec("two-turns", Section, lambda options, outside: TwoTurns(), lambda options, seed: Tasks())  # type: ignore[arg-type, return-value]


class Ports:
    """Request source, trajectory sink and policy feed in memory; ``until`` says when the worker should stop."""

    def __init__(self, folders: dict[int, Path], requests: Sequence[RolloutRequest], newest: int | None = 1) -> None:
        self.folders, self.pending, self.published = folders, list(requests), newest
        self.put_rollouts: list[Rollout] = []
        self.put_at: list[float] = []
        self.stored_parts: list[RolloutPart] = []
        self.given_up: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.states: list[tuple[str, int | None]] = []
        self.flushes: list[bool] = []
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.fetch_s = 0.0
        self.on_put: Callable[[int], None] = lambda count: None

    def lease(self, limit: int) -> list[RolloutRequest]:
        self.threads.add(threading.current_thread().name)
        taken, self.pending = self.pending[:limit], self.pending[limit:]
        self.events += ["lease"] * bool(taken)
        return taken

    def fail(self, request: RolloutRequest, reason: str) -> None:
        self.failed.append((request.number, reason))

    def heartbeat(self, state: str, version: int | None) -> None:
        self.states.append((state, version))

    def newest(self) -> int | None:
        return self.published

    def fetch(self, version: int) -> Path:
        time.sleep(self.fetch_s)
        self.events.append(f"fetch {version}")
        return self.folders[version]

    def put(self, rollout: Rollout) -> None:
        validate_rollout(rollout)
        self.put_rollouts.append(rollout)
        self.put_at.append(time.monotonic())
        self.on_put(len(self.put_rollouts))

    def flush(self, wait: bool = False) -> None:
        self.flushes.append(wait)

    def put_part(self, part: RolloutPart) -> bool:
        self.stored_parts.append(part)
        return True

    def parts(self, request: RolloutRequest) -> tuple[RolloutPart, ...]:
        return tuple(self.stored_parts)

    def give_up_parts(self, request: RolloutRequest) -> None:
        self.threads.add(threading.current_thread().name)
        self.given_up.append(request.number)

    def trajectories(self) -> dict[int, Any]:
        return {rollout[0].request_number: rollout[0] for rollout in self.put_rollouts}


def settings(**rollout: Any) -> TrainConfig:
    fields = {"slots": 4, "max_action_tokens": 40, "max_context_tokens": 96, "max_turns": 4, "device": "cpu"} | rollout
    return parse_config({"rollout": fields, "seed": 5, "learner": {"batch_size": 4}})


def work(ports: Ports, until: Callable[[], bool], config: TrainConfig | None = None, **arguments: Any) -> WorkerStats:
    limit = time.monotonic() + 60

    def stop() -> bool:
        assert time.monotonic() < limit, "the worker did not get there"
        return until()

    config = config or settings()
    return run_worker(config, ports, ports, ports, SPEC, Tasks(), stop, **arguments)  # type: ignore[arg-type]


def test_every_request_becomes_one_rollout_whose_logprobs_recompute(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n, prompt_key="k" * (n % 7)) for n in range(24)])
    stats = work(ports, lambda: len(ports.put_rollouts) == 24)
    assert sorted(ports.trajectories()) == list(range(24))
    for trajectory in ports.trajectories().values():
        mask = trajectory.action_mask
        expected = full_forward(policy(1), trajectory.token_ids)[mask]
        np.testing.assert_allclose(trajectory.behavior_logprobs[mask], expected, atol=1e-4)
    outcomes = Counter(t.outcome for t in ports.trajectories().values())
    assert outcomes[Outcome.COMPLETED] > 3
    assert stats.rollouts == 24
    assert stats.sampled_tokens == sum(t.num_action_tokens for t in ports.trajectories().values())
    assert stats.tokens_per_s > 0


def test_the_same_seed_gives_the_same_rollouts_whatever_runs_beside_them(folders: dict[int, Path]) -> None:
    kept = []
    for numbers, slots in ((range(8), 4), (reversed(range(8)), 3)):
        ports = Ports(folders, [request(n) for n in numbers])
        work(ports, lambda ports=ports: len(ports.put_rollouts) == 8, settings(slots=slots))
        kept.append({n: t.token_ids.tolist() for n, t in ports.trajectories().items()})
    assert kept[0] == kept[1]


def test_nothing_is_leased_before_the_first_version_is_published(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n) for n in range(4)], newest=None)
    threading.Timer(0.3, lambda: setattr(ports, "published", 2)).start()
    work(ports, lambda: len(ports.put_rollouts) == 4)
    assert ports.events[:2] == ["fetch 2", "lease"]
    assert ports.states[0] == ("waiting", None)
    assert {v for t in ports.trajectories().values() for v in t.policy_versions[t.action_mask]} == {2}


def test_a_worker_that_is_stopped_while_it_waits_for_a_version_ends(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request()], newest=None)
    assert work(ports, lambda: len(ports.states) > 0).rollouts == 0
    assert ports.pending


def test_a_slow_environment_never_stalls_other_slots(folders: dict[int, Path]) -> None:
    keys = ["endless", "endless", "endless", *(f"quick-{n}" for n in range(30))]
    ports = Ports(folders, [request(n, prompt_key=key) for n, key in enumerate(keys)])
    TwoTurns.waiting = 0
    work(ports, lambda: sum(n >= 3 for n in ports.trajectories()) == 30, settings(max_action_tokens=90))
    assert TwoTurns.waiting > 0


def test_a_slot_takes_the_next_request_as_soon_as_its_rollout_ends(folders: dict[int, Path]) -> None:
    """With one slot and a backlog, no step of the engine is spent without a running rollout."""
    ports = Ports(folders, [request(n) for n in range(12)])
    engines: list[Any] = []

    def start(config: TrainConfig, folder: Path, version: int) -> Any:
        engines.append(start_transformers_engine(config, folder, version))
        return engines[0]

    stats = work(ports, lambda: len(ports.put_rollouts) == 12, settings(slots=1), start_engine=start)
    assert engines[0][0].stats.steps == stats.sampled_tokens


def test_a_swap_drops_nothing_and_each_token_carries_the_version_that_sampled_it(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n, prompt_key="slow" if n % 5 == 0 else "k") for n in range(40)])

    def publish(count: int) -> None:
        ports.published = 1 + (count >= 8) + (count >= 24)

    ports.on_put = publish
    stats = work(ports, lambda: len(ports.put_rollouts) == 40)
    models = {version: policy(version) for version in VERSIONS}
    seen, mixed = set(), 0
    for trajectory in ports.trajectories().values():
        mask = trajectory.action_mask
        used = set(trajectory.policy_versions[mask])
        seen |= used
        mixed += len(used) > 1
        for version in used:
            ours = trajectory.policy_versions == version
            expected = full_forward(models[version], trajectory.token_ids)
            np.testing.assert_allclose(trajectory.behavior_logprobs[ours], expected[ours], atol=1e-4)
    assert seen == {1, 2, 3}
    assert mixed > 0
    assert sorted(ports.trajectories()) == list(range(40))
    assert (stats.swaps, stats.failed) == (2, 0)


def test_an_idle_worker_takes_new_weights_before_it_starts_what_was_issued_after_them(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n) for n in range(4)])

    def next_batch(count: int) -> None:
        if count == 4:
            ports.fetch_s = 0.2
            ports.published = 2
            ports.pending = [request(n) for n in range(4, 8)]

    ports.on_put = next_batch
    work(ports, lambda: len(ports.put_rollouts) == 8)
    versions = [set(rollout[0].policy_versions[rollout[0].action_mask]) for rollout in ports.put_rollouts]
    assert versions == [{1}] * 4 + [{2}] * 4


@pytest.mark.parametrize(("pins", "swaps"), [([3, 3, 3, 3, 1, 1, 1, 1], 2), ([3, 1, 3, 3, 1, 2, 1, 3], 8)])
def test_pinned_evaluations_are_served_by_their_version_and_no_other(
    folders: dict[int, Path], pins: list[int], swaps: int
) -> None:
    requests = [
        request(n, purpose=Purpose.EVALUATE, policy_version=pin, prompt_key="slow" if n % 3 == 0 else "k")
        for n, pin in enumerate(pins)
    ]
    ports = Ports(folders, requests, newest=2)
    stats = work(ports, lambda: len(ports.put_rollouts) == len(pins), settings(slots=2))
    for number, trajectory in ports.trajectories().items():
        assert set(trajectory.policy_versions[trajectory.action_mask]) == {pins[number]}
    assert stats.swaps <= swaps


def test_what_the_environment_breaks_is_recorded_or_given_up_and_the_loop_goes_on(folders: dict[int, Path]) -> None:
    keys = ["unborn", "broken", "unknown", *"abcdefghijklm"]
    ports = Ports(folders, [request(n, prompt_key=key) for n, key in enumerate(keys)])
    work(ports, lambda: len(ports.put_rollouts) + len(ports.failed) == len(keys), settings(max_action_tokens=90))
    assert sorted(ports.failed) == [
        (0, "environment reset raised RuntimeError: no sandbox"),
        (2, "no environment for prompt unknown: KeyError: 'unknown'"),
    ]
    broken = ports.trajectories()[1]
    assert (broken.outcome, broken.stop_reason) == (
        Outcome.FAILED,
        "environment step raised RuntimeError: sandbox lost",
    )


def test_stop_is_prompt_drops_what_is_in_flight_and_flushes_the_rest(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n, prompt_key="endless" if n < 3 else "k") for n in range(12)])
    done_at: list[float] = []

    def until() -> bool:
        if len(ports.put_rollouts) >= 6:
            done_at.append(time.monotonic())
        return bool(done_at)

    work(ports, until, settings(max_action_tokens=90))
    assert time.monotonic() - done_at[0] < 10
    assert not {0, 1, 2} & {n for n, t in ports.trajectories().items() if t.outcome is not Outcome.TRUNCATED}
    assert ports.flushes[-1] is True
    assert ports.states[-1] == ("stopped", 1)


def test_a_task_that_is_long_in_the_making_stops_neither_the_loop_nor_its_end(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(0, prompt_key="unanswered")])
    started = time.monotonic()
    try:
        work(ports, Tasks.asked.is_set)
    finally:
        Tasks.answer.set()
    assert time.monotonic() - started < 15
    assert ports.states[-1] == ("stopped", 1)


def test_rollouts_are_flushed_as_soon_as_there_is_nothing_more_to_do(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n) for n in range(4)])
    work(ports, lambda: len(ports.put_rollouts) == 4 and bool(ports.flushes))
    assert ports.flushes[0] is False


def test_a_failing_sink_or_feed_or_engine_ends_the_worker_with_its_error(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n) for n in range(8)])

    def full(count: int) -> None:
        raise OSError("disk is full")

    ports.on_put = full
    with pytest.raises(OSError, match="disk is full"):
        work(ports, lambda: False)
    ports = Ports(folders, [request(n, prompt_key="slow") for n in range(8)])
    ports.on_put = lambda count: setattr(ports, "published", 99)
    with pytest.raises(KeyError, match="99"):
        work(ports, lambda: False)


def test_ports_are_called_from_one_thread_beside_the_loop(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(n) for n in range(8)])
    work(ports, lambda: len(ports.put_rollouts) == 8)
    assert ports.threads == {"ports_0"}


def test_heartbeats_come_at_least_four_times_a_lease(folders: dict[int, Path]) -> None:
    ports = Ports(folders, [request(0, prompt_key="endless"), *(request(n) for n in range(1, 9))])
    end = time.monotonic() + 1.2
    work(ports, lambda: time.monotonic() > end, settings(lease_s=0.4))
    assert 4 <= len([state for state, _ in ports.states if state in ("running", "idle")]) <= 14


def begun(folders: dict[int, Path], key: str, version: int) -> list[RolloutPart]:
    """Parts of a rollout of request 0 that a worker with this policy began and did not finish."""
    ports = Ports(folders, [request(0, prompt_key=key)], newest=version)
    work(ports, lambda: len(ports.stored_parts) > 1, settings(partial_after_s=0.01, max_action_tokens=90))
    return ports.stored_parts[:2]


def go_on(folders: dict[int, Path], key: str, parts: list[RolloutPart], publish: int | None = None) -> Ports:
    """A worker that has policy 1, and gets another one while it serves request 0 of which there are parts."""
    ports = Ports(folders, [request(0, 2, prompt_key=key, parts=2)])
    ports.stored_parts = list(parts)
    if publish is not None:
        threading.Timer(0.5, lambda: setattr(ports, "published", publish)).start()
    work(ports, lambda: len(ports.put_rollouts) == 1, settings(max_action_tokens=90))
    return ports


def test_what_another_worker_began_goes_on_under_weights_that_are_no_older(folders: dict[int, Path]) -> None:
    parts = begun(folders, "slow", version=2)
    ports = go_on(folders, "slow", parts, publish=3)
    before, after = join(parts).segments[0], ports.trajectories()[0]
    count = before.num_tokens
    assert after.token_ids[:count].tobytes() == before.token_ids.tobytes()
    assert after.behavior_logprobs[:count].tobytes() == before.behavior_logprobs.tobytes()
    assert set(after.policy_versions[:count][after.action_mask[:count]]) == {2}
    assert set(after.policy_versions[count:][after.action_mask[count:]]) == {3}
    assert (after.attempt, ports.given_up) == (2, [])


@pytest.mark.parametrize(
    ("key", "readable", "newest", "reason"),
    [
        ("slow lost", True, 2, "environment restore raised RuntimeError: sandbox lost"),
        ("slow", False, 2, "its parts cannot be read"),
        ("slow", True, None, "no policy as new as version 2"),
    ],
)
def test_a_rollout_that_cannot_go_on_starts_anew_and_says_why(
    folders: dict[int, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    key: str,
    readable: bool,
    newest: int | None,
    reason: str,
) -> None:
    monkeypatch.setattr("sao_core.rollout.worker.NEWER_WEIGHTS_S", 20.0 if newest else 0.2)
    parts = begun(folders, key, version=2)
    ports = go_on(folders, key, parts if readable else [], publish=newest)
    assert ports.given_up == [0]
    assert f"request 0, attempt 2 starts anew: {reason}" in caplog.text
    assert ports.trajectories()[0].outcome is not Outcome.FAILED
    assert ports.threads == {"ports_0"}
