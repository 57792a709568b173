"""The rollout loop: keeps an engine's slots full with leased requests and its weights fresh.

    lanes (one per slot): take a request ─▶ run its rollout ─▶ sink.put ─▶ take the next at once
    control (every 50 ms, or when a lane runs dry): lease, then look for the newest version; fetch it beside the loop;
                          swap between two tokens; heartbeat; stop
    engine: one step at a time on the same event loop, while the lanes wait for their tokens or their environment

No lane waits for another, and nothing is drained at a swap. A rollout in flight when the worker stops is dropped: its
lease runs out, and whoever takes it next goes on from the parts that it had put, under weights that are no older than
those of its last token. Reads requests and policies and writes trajectories through protocols only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sao_core.config import TrainConfig
from sao_core.environments.base import Environment, EnvironmentSpec, Task, TaskSource
from sao_core.environments.external import ExternalAgent
from sao_core.environments.one_thread import OneThread
from sao_core.outside import Outside
from sao_core.protocols import PolicyFeed, RequestSource, Rollout, RolloutRequest, TrajectorySink
from sao_core.rollout.agent import AttemptFailed, NotRestored, run_rollout
from sao_core.rollout.engine import Engine
from sao_core.rollout.external import run_external
from sao_core.rollout.parts import Unfinished, join
from sao_core.rollout.renderer import Renderer
from sao_core.rollout.transformers_engine import start_transformers_engine
from sao_core.trajectory import Outcome

log = logging.getLogger(__name__)

T = TypeVar("T")
StartEngine = Callable[[TrainConfig, Path, int], tuple[Engine, Renderer]]
"""(settings, folder of the first policy, its version) → the engine that serves, and the renderer of its tokenizer."""

TICK_S = 0.05
"""How often a worker asks for requests and for a newer version."""
HEARTBEAT_S = 2.0
"""How often it says that it lives, unless leases are shorter."""
CLOSE_S = 2.0
"""How long a worker that stops waits for environments to close."""
REPORT_S = 10.0
"""How often it logs its throughput."""
NEWER_WEIGHTS_S = 120.0
"""How long a rollout that was begun under weights which a rewind undid waits for newer ones, before it starts anew."""


@dataclass
class WorkerStats:
    """What a worker has done since its first policy arrived."""

    rollouts: int = 0
    """Rollouts handed to the sink, failed ones included."""
    failed: int = 0
    """Rollouts that their environment broke, recorded or not."""
    sampled_tokens: int = 0
    processed_tokens: int = 0
    swaps: int = 0
    swap_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second."""
        return self.sampled_tokens / self.elapsed_s if self.elapsed_s else 0.0


def run_worker(
    config: TrainConfig,
    source: RequestSource,
    sink: TrajectorySink,
    feed: PolicyFeed,
    environment_spec: EnvironmentSpec,
    task_source: TaskSource,
    stop: Callable[[], bool],
    *,
    outside: Outside | None = None,
    start_engine: StartEngine = start_transformers_engine,
) -> WorkerStats:
    """Serve requests until ``stop()`` is true; returns what was done.

    Nothing is leased before the feed has announced a version. ``source``, ``feed.newest`` and ``sink.give_up_parts``
    are called from a thread of their own, ``feed.fetch`` and ``sink.parts`` from another, ``task_source.task`` from a
    third, the rest from the caller's. Raises what any of them or the engine raises; a rollout that its environment
    breaks is recorded as failed, or its attempt given up if the policy said nothing yet. ``outside`` is lent to the
    environments.
    """
    outside = outside or Outside()
    worker = _Worker(config, source, sink, feed, environment_spec, task_source, stop, outside, start_engine)
    return asyncio.run(worker.run())


class _Worker:
    def __init__(
        self,
        config: TrainConfig,
        source: RequestSource,
        sink: TrajectorySink,
        feed: PolicyFeed,
        environment_spec: EnvironmentSpec,
        task_source: TaskSource,
        stop: Callable[[], bool],
        outside: Outside,
        start_engine: StartEngine,
    ) -> None:
        self._config, self._source, self._sink, self._feed = config, source, sink, feed
        self._spec, self._tasks = environment_spec, task_source
        self._options = environment_spec.parse_options(config.environment.options)
        self._stop, self._outside, self._start_engine = stop, outside, start_engine
        self._engine: Engine
        self._renderer: Renderer
        self._ports = ThreadPoolExecutor(1, thread_name_prefix="ports")
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._task_thread = OneThread("tasks")  # making one may take a while, or ask another process
        self._fetching: tuple[int, asyncio.Future[Path]] | None = None
        self._backlog: deque[RolloutRequest] = deque()
        self._idle: deque[asyncio.Future[RolloutRequest]] = deque()
        self._running = 0
        self._started_since = 0
        self._reserve = 1
        self._newest = -1
        self._pin: int | None = None
        self._dry = False
        self._unflushed = False
        self._wake = asyncio.Event()
        self._heartbeat_at = 0.0
        self._report_at = time.monotonic() + REPORT_S
        self._started = time.monotonic()
        self._stats = WorkerStats()

    async def run(self) -> WorkerStats:
        """The whole life of a worker."""
        try:
            if await self._wait_for_a_version():
                await self._serve_until_stopped()
                await self._in(self._ports, self._source.heartbeat, "stopped", self._engine.version)
        finally:
            self._ports.shutdown(wait=False, cancel_futures=True)
            self._fetcher.shutdown(wait=False, cancel_futures=True)
            self._task_thread.stop()
        return self._stats

    async def _wait_for_a_version(self) -> bool:
        """Start the engine with the first published policy; False if told to stop before there is one."""
        while not self._stop():
            _, newest = await self._in(self._ports, self._ask, 0, "waiting", None)
            if newest is not None:
                starting = asyncio.ensure_future(self._in(self._fetcher, self._start, newest))
                while not starting.done():
                    await asyncio.wait([starting], timeout=TICK_S)
                    await self._in(self._ports, self._ask, 0, "starting", None)
                self._engine, self._renderer = starting.result()
                self._newest, self._started = newest, time.monotonic()
                return True
            await asyncio.sleep(TICK_S)
        return False

    def _start(self, version: int) -> tuple[Engine, Renderer]:
        return self._start_engine(self._config, self._feed.fetch(version), version)

    async def _serve_until_stopped(self) -> None:
        tasks = [asyncio.create_task(self._engine.run(), name="engine")]
        tasks += [asyncio.create_task(self._lane(), name=f"lane {slot}") for slot in range(self._engine.slots)]
        for task in tasks:
            task.add_done_callback(lambda _: self._wake.set())
        try:
            while not self._stop():
                for task in tasks:
                    if task.done():
                        task.result()
                        raise RuntimeError(f"{task.get_name()} of the rollout worker ended by itself")
                await self._turn_over()
                await self._rest()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CLOSE_S)
            self._count()
        self._sink.flush(wait=True)

    async def _lane(self) -> None:
        """One slot: rollout after rollout."""
        while True:
            request = self._pop()
            if request is None:
                place = asyncio.get_running_loop().create_future()
                self._idle.append(place)
                if not self._dry:
                    self._wake.set()
                request = await place
            try:
                await self._serve(request)
            finally:
                self._running -= 1
                if not self._running:
                    self._wake.set()

    async def _serve(self, request: RolloutRequest) -> None:
        try:
            rollout = await self._make(request)
        except AttemptFailed as error:
            self._stats.failed += 1
            log.warning("request %d, attempt %d failed: %s", request.number, request.attempt, error)
            await self._in(self._ports, self._source.fail, request, str(error))
            return
        if rollout[0].outcome is Outcome.FAILED:
            self._stats.failed += 1
            log.warning("request %d, attempt %d failed: %s", request.number, request.attempt, rollout[0].stop_reason)
        self._sink.put(rollout)
        self._stats.rollouts += 1
        self._unflushed = True

    async def _make(self, request: RolloutRequest) -> Rollout:
        """The rollout of a request: what earlier workers began goes on, or else it starts anew."""
        if request.parts:
            try:
                return await self._run(request, await self._begun(request))
            except NotRestored as error:
                log.warning("request %d, attempt %d starts anew: %s", request.number, request.attempt, error)
            await self._in(self._ports, self._sink.give_up_parts, request)
        return await self._run(request, None)

    async def _run(self, request: RolloutRequest, begun: Unfinished | None) -> Rollout:
        task, environment = await self._prepare(request)
        name = task.environment or self._config.environment.name
        if isinstance(environment, ExternalAgent):
            if begun is not None:
                raise NotRestored("a program cannot go on where another one stopped")
            return await run_external(
                request,
                self._engine,
                environment,
                task,
                self._renderer,
                self._config.rollout,
                self._outside,
                environment_name=name,
                seed=self._config.seed,
            )
        return await run_rollout(
            request,
            self._engine,
            environment,
            task,
            self._renderer,
            self._config.rollout,
            environment_name=name,
            seed=self._config.seed,
            begun=begun,
            put_part=self._sink.put_part,
        )

    async def _begun(self, request: RolloutRequest) -> Unfinished:
        """What there is of a request, once the weights are as new as those that sampled its last token."""
        parts = await self._in(self._fetcher, self._sink.parts, request)
        if not parts:
            raise NotRestored("its parts cannot be read")
        begun = join(parts)
        give_up_at = time.monotonic() + NEWER_WEIGHTS_S
        while self._engine.version < begun.version_max:
            if time.monotonic() > give_up_at:
                raise NotRestored(f"no policy as new as version {begun.version_max}, which sampled its last tokens")
            await asyncio.sleep(TICK_S)
        return begun

    async def _prepare(self, request: RolloutRequest) -> tuple[Task, Environment]:
        try:
            async with asyncio.timeout(self._config.rollout.step_timeout_s):
                task = await self._task_thread.run(self._tasks.task, request.prompt_key)
            return task, self._spec.episode(self._options, task, self._outside)
        except Exception as error:
            raise AttemptFailed(
                f"no environment for prompt {request.prompt_key}: {type(error).__name__}: {error}"
            ) from error

    async def _turn_over(self) -> None:
        """Lease, then look at versions, so that what was issued after a publication is served by those weights.

        While all lanes are busy, twice as many requests are held ready as were started since the last time: enough for
        a lane that ends to go on at once, and no more, since other workers could serve them.
        """
        self._reserve = min(max(2 * self._started_since, self._engine.slots // 8, 1), self._engine.slots)
        self._started_since = 0
        wanted = max((len(self._idle) or self._reserve) - len(self._backlog), 0)
        leased, newest = await self._in(
            self._ports, self._ask, wanted, "running" if self._running else "idle", self._engine.version
        )
        self._backlog += leased
        self._dry = len(leased) < wanted
        if newest is not None:
            self._newest = newest
        await self._refresh_weights()
        while self._idle and (request := self._pop()):
            self._idle.popleft().set_result(request)
        if self._unflushed and (self._dry or not self._running):
            self._unflushed = False
            self._sink.flush()
        if time.monotonic() >= self._report_at:
            self._count()
            log.info("%d rollouts, %.0f tokens/s", self._stats.rollouts, self._stats.tokens_per_s)
            self._report_at = time.monotonic() + REPORT_S

    async def _rest(self) -> None:
        """Until the next tick, or until a lane needs something."""
        try:
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _ask(self, wanted: int, state: str, version: int | None) -> tuple[list[RolloutRequest], int | None]:
        now = time.monotonic()
        if now >= self._heartbeat_at:
            self._source.heartbeat(state, version)
            self._heartbeat_at = now + min(self._config.rollout.lease_s / 4, HEARTBEAT_S)
        leased = self._source.lease(wanted) if wanted else []
        return leased, self._feed.newest()

    def _pop(self) -> RolloutRequest | None:
        """The next request that the weights at hand may serve, counted as running; None while there is none.

        A worker with nothing running takes up the version that is wanted before it starts anything; after that,
        requests without a pinned version run under whatever is loaded, pinned ones wait for those of other versions.
        """
        if not self._backlog:
            return None
        if not self._running:
            self._pin = self._backlog[0].policy_version
            if self._engine.version != self._target():
                self._wake.set()
                return None
        for index, request in enumerate(self._backlog):
            if request.policy_version == self._pin:
                del self._backlog[index]
                self._running += 1
                self._started_since += 1
                if len(self._backlog) < self._reserve // 2 and not self._dry:
                    self._wake.set()
                return request
        return None

    def _target(self) -> int:
        """The version that ought to be loaded."""
        return self._newest if self._pin is None else self._pin

    async def _refresh_weights(self) -> None:
        """Fetch the wanted version beside the loop, and swap between two tokens once it is here."""
        if not self._running:
            self._pin = self._backlog[0].policy_version if self._backlog else None
        wanted = self._target()
        outdated = wanted > self._engine.version if self._running else wanted != self._engine.version
        if self._fetching is None and outdated:
            future = asyncio.get_running_loop().run_in_executor(self._fetcher, self._feed.fetch, wanted)
            future.add_done_callback(lambda _: self._wake.set())
            self._fetching = wanted, future
        if self._fetching is not None and not self._running:
            await asyncio.wait([self._fetching[1]], timeout=TICK_S)
        if self._fetching is not None and self._fetching[1].done():
            version, arrived = self._fetching
            self._fetching = None
            if version == wanted:
                await self._engine.swap(arrived.result(), version)

    def _count(self) -> None:
        engine = self._engine.stats
        self._stats.sampled_tokens, self._stats.processed_tokens = engine.sampled_tokens, engine.processed_tokens
        self._stats.swaps, self._stats.swap_s = engine.swaps, engine.swap_s
        self._stats.elapsed_s = time.monotonic() - self._started

    async def _in(self, executor: ThreadPoolExecutor, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
