"""A rollout driven by a program: its end, its failures and its reward, with a program that is a coroutine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_fixtures import TOKENIZER, ScriptedEngine, request, said

from sao_core.agent_programs import MODEL_NAME, Address, ChatAnswerer, ProgramEnded, RolloutOver
from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments import base as environments
from sao_core.environments.base import Task
from sao_core.environments.external import ExternalAgent, ExternalAgentOptions, ExternalTasks
from sao_core.outside import NotLent, Outside
from sao_core.protocols import Rollout
from sao_core.rollout.agent import AttemptFailed
from sao_core.rollout.engine import EngineError
from sao_core.rollout.external import run_external
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Outcome, Purpose, Role, Sampling

RENDERER = Renderer(TOKENIZER)
LIMITS = RolloutConfig(max_turns=3, max_action_tokens=64, max_context_tokens=512, step_timeout_s=5)
ASK = Message(Role.USER, "what is 1 plus 2")
ANSWER = said("answer: 3")
GOOD = json.dumps({"reward": 0.5, "parts": {"correct": 1}})
Program = Callable[[ChatAnswerer], Awaitable[ProgramEnded]]


def ended(**changes: Any) -> ProgramEnded:
    return ProgramEnded(**{"exit_code": 0, "stdout": "", "stderr": "", "result": None} | changes)


class Here:
    """Endpoint and programs in one: what is started is a coroutine that calls the rollout itself."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.started: list[tuple[list[str], Mapping[str, Any], Mapping[str, str]]] = []
        self.stopped = 0

    @asynccontextmanager
    async def serving(self, rollout: ChatAnswerer) -> AsyncIterator[Address]:
        self.rollout = rollout
        yield Address("http://there/v1", "sk-1")

    @asynccontextmanager
    async def start(
        self, command: Sequence[str], task: Mapping[str, Any], variables: Mapping[str, str]
    ) -> AsyncIterator["Here"]:
        self.started.append((list(command), task, variables))
        self.task = asyncio.ensure_future(self.program(self.rollout))
        yield self
        self.task.cancel()

    async def wait(self) -> ProgramEnded:
        return await asyncio.shield(self.task)

    async def stop(self) -> ProgramEnded:
        self.stopped += 1
        self.task.cancel()
        return ended(exit_code=None, stderr="step 1\nstill thinking\n")


def play(
    program: Program,
    *,
    turns: Sequence[Sequence[int]] = (ANSWER, ANSWER, ANSWER),
    options: Mapping[str, Any] | None = None,
    asked: Any = None,
    engine: Any = None,
    **limits: Any,
) -> tuple[Rollout, Here]:
    here = Here(program)
    engine = engine or ScriptedEngine(turns)
    given = {"command": ["agent", "--question", "{question}"], "tasks": "unread"} | dict(options or {})
    rollout = asyncio.run(
        run_external(
            asked or request(4),
            engine,
            ExternalAgent(ExternalAgentOptions(**given)),
            Task("row/1", "2", {"row": {"question": "1 plus 2"}}),
            RENDERER,
            LIMITS.model_copy(update=limits),
            Outside(chat_endpoint=here, program_starter=here),
            environment_name="external_agent",
            seed=11,
        )
    )
    assert engine.closed == 1
    return rollout, here


def asks_and(result: ProgramEnded, calls: int = 1) -> Program:
    async def program(rollout: ChatAnswerer) -> ProgramEnded:
        for _ in range(calls):
            await rollout.complete([ASK])
        return result

    return program


def test_a_program_gets_its_task_and_address_and_leaves_the_reward() -> None:
    (t,), here = play(asks_and(ended(result=GOOD)))
    command, task, variables = here.started[0]
    assert command == ["agent", "--question", "1 plus 2"]
    assert task == {"question": "1 plus 2"}
    assert {name: variables[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")} == {
        "OPENAI_BASE_URL": "http://there/v1",
        "OPENAI_API_KEY": "sk-1",
        "OPENAI_MODEL": MODEL_NAME,
    }
    assert t.token_ids.tolist() == RENDERER.prompt_ids([ASK]) + ANSWER
    assert (t.outcome, t.stop_reason, t.score, t.reward_parts) == (Outcome.COMPLETED, "terminated", 0.5, {"correct": 1})
    assert np.flatnonzero(t.rewards).tolist() == [t.num_tokens - 1]
    assert (t.environment, t.environment_version, t.environment_seed, t.difficulty) == ("external_agent", "1", 11, "2")
    assert set(t.timings) == {"started_at", "duration_s", "environment_s", "generation_s"}
    assert here.stopped == 0


def test_the_last_line_that_a_program_prints_may_be_the_result() -> None:
    (t,), _ = play(asks_and(ended(stdout=f"thinking\n{GOOD}\n")))
    assert t.score == 0.5


def judge(row: Mapping[str, Any], left: ProgramEnded, messages: Sequence[Message]) -> Any:
    assert [message.content for message in messages] == [ASK.content, "answer: 3"]
    if left.stdout == "broken":
        raise KeyError("stdout")
    return float(row["question"] == "1 plus 2") if left.stdout == "number" else {"reward": 0.25, "parts": {"style": 2}}


def test_a_function_of_the_users_may_judge_instead() -> None:
    options = {"reward": "test_external_agent:judge"}
    assert play(asks_and(ended(stdout="number")), options=options)[0][0].score == 1.0
    (t,), _ = play(asks_and(ended()), options=options)
    assert (t.score, t.reward_parts) == (0.25, {"style": 2.0})
    (t,), _ = play(asks_and(ended(stdout="broken")), options=options)
    assert (t.outcome, t.stop_reason) == (Outcome.FAILED, "test_external_agent:judge raised KeyError: 'stdout'")


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (
            ended(exit_code=3, stderr="Traceback\nValueError: no", result=GOOD),
            "exit code 3: Traceback | ValueError: no",
        ),
        (ended(exit_code=-9, stdout="hm"), "the program ended with signal 9: hm"),
        (ended(), "the program left no reward: it has to write an object with `reward`"),
        (ended(stdout="0.5"), "the program left no reward"),
        (ended(result="no"), "SAO_RESULT holds no JSON"),
        (ended(result='{"reward": NaN}'), "`reward` must be a finite number: got nan"),
        (ended(result='{"reward": "good"}'), "`reward` must be a finite number: got 'good'"),
        (ended(result='{"parts": {}}'), "`reward` must be a finite number: got None"),
        (ended(result='{"reward": 0, "parts": {"a": Infinity}}'), "`a` must be a finite number: got inf"),
        (ended(result='{"reward": 0, "parts": 3}'), "`parts` must be an object of numbers: got 3"),
        (ended(result='{"reward": 7}'), "reward 7 is outside environment.options.reward_range 0…1"),
    ],
    ids=["crash", "signal", "nothing", "number", "no JSON", "NaN", "text", "none", "part", "parts", "range"],
)
def test_what_a_program_gets_wrong_is_a_failed_rollout_with_its_reason(left: ProgramEnded, reason: str) -> None:
    (t,), _ = play(asks_and(left))
    assert t.outcome is Outcome.FAILED
    assert reason in t.stop_reason
    assert t.token_ids[t.action_mask].tolist() == ANSWER
    assert (t.score, t.rewards.any()) == (0.0, False)


async def silent(rollout: ChatAnswerer) -> ProgramEnded:
    await rollout.complete([ASK])
    await asyncio.Event().wait()
    raise AssertionError


def test_a_program_that_hangs_is_stopped_and_its_rollout_failed() -> None:
    (t,), here = play(silent, step_timeout_s=0.05)
    assert here.stopped == 1
    assert (t.outcome, t.stop_reason) == (
        Outcome.FAILED,
        "the program made no call for rollout.step_timeout_s=0.05: step 1 | still thinking",
    )


def slow_judge(row: Mapping[str, Any], left: ProgramEnded, messages: Sequence[Message]) -> float:
    time.sleep(0.3)
    return 1.0


def test_a_judge_that_takes_too_long_fails_the_rollout() -> None:
    (t,), _ = play(asks_and(ended()), options={"reward": "test_external_agent:slow_judge"}, step_timeout_s=0.05)
    assert (t.outcome, t.stop_reason) == (Outcome.FAILED, "its judge took longer than rollout.step_timeout_s=0.05")


def test_a_program_that_outlasts_the_rollout_is_truncated_with_what_it_has() -> None:
    (t,), here = play(silent, rollout_timeout_s=0.05)
    assert (here.stopped, t.outcome, t.stop_reason) == (1, Outcome.TRUNCATED, "rollout_timeout")
    assert t.token_ids[t.action_mask].tolist() == ANSWER


@pytest.mark.parametrize(
    ("left", "score"), [(ended(result=GOOD), 0.5), (ended(exit_code=1), 0.0)], ids=["reward", "none"]
)
def test_a_program_that_a_limit_cuts_is_truncated_and_may_still_leave_a_reward(
    left: ProgramEnded, score: float
) -> None:
    async def program(rollout: ChatAnswerer) -> ProgramEnded:
        for _ in range(3):
            await rollout.complete([ASK])
        with pytest.raises(RolloutOver):
            await rollout.complete([ASK])
        return left

    rollout, _ = play(program)
    assert len(rollout) == 3
    assert {(t.outcome, t.stop_reason, t.score) for t in rollout} == {(Outcome.TRUNCATED, "max_turns", score)}
    assert [t.rewards.sum() for t in rollout] == [0.0, 0.0, score]


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (ended(result=GOOD), "no call was answered: terminated"),
        (ended(exit_code=1, stderr="no such module"), "no call was answered: the program ended with exit code 1"),
        (ended(exit_code=None, problem="agent: No such file"), "the program cannot be started: agent: No such file"),
    ],
    ids=["no call", "crash", "no program"],
)
def test_a_program_to_which_the_policy_said_nothing_fails_the_attempt(left: ProgramEnded, reason: str) -> None:
    with pytest.raises(AttemptFailed, match=reason):
        play(asks_and(left, calls=0))


def test_a_broken_engine_is_no_fault_of_the_program() -> None:
    class Broken(ScriptedEngine):
        async def extend_and_sample(self, *arguments: Any) -> Any:
            raise EngineError("broken weights")

    async def program(rollout: ChatAnswerer) -> ProgramEnded:
        with pytest.raises(EngineError):
            await rollout.complete([ASK])
        return ended(exit_code=1)

    with pytest.raises(EngineError, match="broken weights"):
        play(program, engine=Broken([]))


def test_training_refuses_anything_but_the_policys_own_samples() -> None:
    with pytest.raises(ConfigError, match="must sample from the policy itself"):
        play(asks_and(ended(result=GOOD)), asked=request(sampling=Sampling(greedy=True)), engine=Closed())
    evaluated = request(sampling=Sampling(greedy=True), purpose=Purpose.EVALUATE)
    assert play(asks_and(ended(result=GOOD)), asked=evaluated)[0][0].sampling.greedy


class Closed(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__([])
        self.closed = 1


def test_a_process_that_lends_no_endpoint_or_programs_says_so() -> None:
    with pytest.raises(NotLent, match="no endpoint"):
        Outside().endpoint  # noqa: B018
    with pytest.raises(NotLent, match="starts a program of its own"):
        Outside().programs  # noqa: B018


def rows(folder: Path, *lines: str) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_tasks_are_the_rows_of_a_file_and_some_are_held_out(tmp_path: Path) -> None:
    path = rows(tmp_path, *(json.dumps({"question": str(n), "difficulty": n % 2}) for n in range(20)))
    options = environments.get("external_agent").parse_options({"command": "python agent.py {question}", "tasks": path})
    assert options.command == ("python", "agent.py", "{question}")
    source = ExternalTasks(options, 3)
    held_out = source.evaluation_keys(10)
    epoch = {source.key_at(position) for position in range(source.epoch_size)}
    assert (len(held_out), len(epoch), epoch & set(held_out)) == (2, 18, set())
    task = source.task("row/7")
    assert (task.difficulty, task.data["row"]["question"]) == ("1", "7")
    with pytest.raises(KeyError):
        source.task("row/20")


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (['{"question": 1}', '{"other": 1}'], {}, r"tasks.jsonl:2: the row has no `question`, which .*command names"),
        (['{"question": 1}', "[1]"], {}, r"tasks.jsonl:2: a row must be an object: got list"),
        (['{"question": 1}'], {}, r"environment.options.tasks needs at least 2 rows"),
        (['{"question": 1}'] * 2, {"reward": "nowhere:judge"}, r"cannot be imported: `nowhere`"),
        (['{"question": 1}'] * 2, {"reward": "json:loads.x"}, r"has no `loads.x`"),
    ],
    ids=["field", "object", "too few", "module", "function"],
)
def test_unusable_tasks_are_named_with_file_line_and_field(
    tmp_path: Path, lines: list[str], options: dict[str, Any], message: str
) -> None:
    given = {"command": "agent {question}", "tasks": rows(tmp_path, *lines)} | options
    with pytest.raises(ConfigError, match=message):
        ExternalTasks(environments.get("external_agent").parse_options(given), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ""}, "command"),
        ({"command": ["agent"], "reward_range": (1, 0)}, "must be two numbers, the smaller one first"),
        ({"command": ["agent"], "timeout": 3}, "timeout"),
    ],
    ids=["no command", "range", "unknown"],
)
def test_unusable_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environments.get("external_agent").parse_options({"tasks": "t.jsonl"} | options)
