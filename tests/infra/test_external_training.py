"""An agent that imports nothing of ours trains: the real client, endpoint, engine and learner, ports in memory.

The agent's functions run in threads here, since a process per rollout would import its libraries each time.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from learner_fixtures import make_config
from rollout_fixtures import TOKENIZER, full_forward, request, small_model

from infra.capture import CaptureEndpoint
from sao_core.agent_programs import ProgramEnded
from sao_core.config import TrainConfig, parse_config
from sao_core.environments import base as environments
from sao_core.learner import Learner
from sao_core.models.policy import load_policy, save_policy
from sao_core.outside import Outside
from sao_core.protocols import Batch, Rollout, RolloutRequest
from sao_core.rollout.worker import run_worker
from sao_core.trajectory import Outcome, validate_rollout

SCAFFOLD = Path(__file__).parents[1] / "data" / "agent_scaffold.py"
BATCH, UPDATES = 4, 3
Agent = Callable[[Mapping[str, Any], Mapping[str, str]], Any]


class Threads:
    """Starts an agent's function in a thread."""

    work: asyncio.Task[Any]

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    @asynccontextmanager
    async def start(
        self, command: Sequence[str], task: Mapping[str, Any], variables: Mapping[str, str]
    ) -> AsyncIterator[Threads]:
        started = Threads(self.agent)
        started.work = asyncio.create_task(asyncio.to_thread(self.agent, task, variables))
        yield started

    async def wait(self) -> ProgramEnded:
        result = await asyncio.shield(self.work)
        return ProgramEnded(0, "", "", json.dumps(result))

    async def stop(self) -> ProgramEnded:
        raise AssertionError("no agent of these tests hangs")


class Ports:
    """Requests, rollouts and policies of one worker, in memory."""

    def __init__(self, policy: Path, requests: Sequence[RolloutRequest]) -> None:
        self.policies, self.pending = {1: policy}, list(requests)
        self.published = 1
        self.rollouts: list[Rollout] = []
        self.failed: list[str] = []
        self.on_put: Callable[[], None] = lambda: None

    def lease(self, limit: int) -> list[RolloutRequest]:
        taken, self.pending = self.pending[:limit], self.pending[limit:]
        return taken

    def fail(self, request: RolloutRequest, reason: str) -> None:
        self.failed.append(reason)

    def heartbeat(self, state: str, version: int | None) -> None: ...

    def newest(self) -> int:
        return self.published

    def fetch(self, version: int) -> Path:
        return self.policies[version]

    def put(self, rollout: Rollout) -> None:
        validate_rollout(rollout)
        self.rollouts.append(rollout)
        self.on_put()

    def flush(self, wait: bool = False) -> None: ...


@pytest.fixture(scope="module")
def first_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "1"
    save_policy(small_model(1, moe=False, spread=0.1), TOKENIZER, folder)
    return folder


def settings(tasks: Path, **rollout: Any) -> TrainConfig:
    fields = {"slots": 3, "max_action_tokens": 60, "max_context_tokens": 768, "max_turns": 40, "device": "cpu"}
    options = {"command": ["in a thread"], "tasks": str(tasks)}
    return parse_config(
        {"environment": {"name": "external_agent", "options": options}, "rollout": fields | rollout, "seed": 5}
    )


def work(ports: Ports, agent: Agent, config: TrainConfig, until: Callable[[], bool]) -> None:
    spec = environments.get("external_agent")
    source = spec.tasks(spec.parse_options(config.environment.options), config.seed)
    limit = time.monotonic() + 60

    def stop() -> bool:
        assert time.monotonic() < limit, f"the worker did not get there: {ports.failed}"
        return until()

    outside = Outside(chat_endpoint=CaptureEndpoint(), program_starter=Threads(agent))
    run_worker(config, ports, ports, ports, spec, source, stop, outside=outside)  # type: ignore[arg-type]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    rows = [{"question": f"compute {n} plus 2", "answer": str(n + 2), "max_tokens": 10} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def check(trajectory: Any, policies: Mapping[int, Path]) -> None:
    """Each token's log-probability is that of the version which it carries."""
    versions = trajectory.policy_versions
    for version in set(versions[trajectory.action_mask]):
        ours = versions == version
        expected = full_forward(load_policy(policies[version], "float32", "cpu"), trajectory.token_ids)
        np.testing.assert_allclose(trajectory.behavior_logprobs[ours], expected[ours], atol=1e-4)


def test_an_agent_that_imports_nothing_of_ours_trains_for_a_few_updates(
    first_policy: Path, tasks: Path, tmp_path: Path
) -> None:
    ports = Ports(first_policy, [request(n, prompt_key=f"row/{n % 8}") for n in range(UPDATES * BATCH)])
    learner = Learner(make_config(learner={"batch_size": BATCH}), first_policy, seed=0, device="cpu")
    metrics: list[dict[str, float]] = []

    def update() -> None:
        if len(ports.rollouts) % BATCH == 0:
            step = len(metrics) + 1
            batch = Batch(step, tuple(ports.rollouts[-BATCH:]))
            metrics.append(learner.update_value(batch, {n: n - 1 for n in ports.policies}) | learner.update_policy())
            ports.policies[step + 1] = tmp_path / str(step + 1)
            learner.save_policy(ports.policies[step + 1])
            ports.published = step + 1

    ports.on_put = update
    solve = runpy.run_path(str(SCAFFOLD))["solve"]
    work(ports, solve, settings(tasks), lambda: len(ports.rollouts) == UPDATES * BATCH)
    assert ports.failed == []
    assert len(metrics) == UPDATES
    assert all(np.isfinite(m["policy/loss"]) and m["policy/grad_norm"] > 0 for m in metrics)
    assert len({rollout[0].score for rollout in ports.rollouts}) > 3
    versions = {int(v) for r in ports.rollouts for t in r for v in t.policy_versions[t.action_mask]}
    assert {1, 2} <= versions
    for rollout in ports.rollouts:
        assert rollout[0].outcome in (Outcome.COMPLETED, Outcome.TRUNCATED)
        assert rollout[0].num_segments == 1, "the agent only ever extends its history"
        turns = rollout[0].reward_parts["turns"]
        assert sum(turn.role == "assistant" for turn in rollout[0].turns) == turns > 0
    check(ports.rollouts[-1][0], ports.policies)


def test_weights_that_change_between_two_calls_are_recorded_with_each_token(
    first_policy: Path, tasks: Path, tmp_path: Path
) -> None:
    ports = Ports(first_policy, [request(0, prompt_key="row/0")])
    ports.policies[2] = tmp_path / "2"
    save_policy(small_model(2, moe=False, spread=0.1), TOKENIZER, ports.policies[2])

    def agent(task: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
        client = openai.OpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"])
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        seen: list[str] = []
        while len(seen) < 30 and (not seen or seen[-1] == "version-1"):
            reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            seen.append(str(reply.system_fingerprint))
            messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
            ports.published = 2
            time.sleep(0.05)
        return {"reward": 1, "parts": {"calls": len(seen), "changed": float(seen[-1] == "version-2")}}

    work(ports, agent, settings(tasks, max_action_tokens=200), lambda: bool(ports.rollouts))
    (t,) = ports.rollouts[0]
    assert t.reward_parts["changed"] == 1
    assert [int(v) for v in np.unique(t.policy_versions[t.action_mask])] == [1, 2]
    check(t, ports.policies)
