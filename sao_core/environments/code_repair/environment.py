"""The code-repair agent: a small repository with a failing test, tools to look, edit and test, and a hidden check.

The policy works on files in memory; only running tests and the final check reach the sandbox. Reward comes with the
end alone: a call of ``submit``, or a turn without a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sao_core.environments.base import StepResult, Task
from sao_core.environments.code_repair.judging import SandboxBroke, judge
from sao_core.environments.code_repair.options import CodeRepairOptions
from sao_core.environments.code_repair.repair_task import HiddenTests, RepairTask
from sao_core.environments.code_repair.test_runs import TestRun, report, run_tests
from sao_core.environments.code_repair.workspace import Refused, Workspace, is_test_file
from sao_core.environments.tools import ToolEnvironment, function
from sao_core.outside import CodeRunner
from sao_core.tool_calls import ToolCall
from sao_core.trajectory import Message, Role

_PATH = "Path in the repository."
TOOLS = (
    function("list_files", "List the files of the repository."),
    function("read_file", "Show a file.", path=_PATH),
    function(
        "replace_text",
        "Replace a text that occurs exactly once in a file.",
        path=_PATH,
        old="The text to replace, with its indentation.",
        new="The text to put in its place.",
    ),
    function("write_file", "Write a whole file, new or not.", path=_PATH, content="All of its text."),
    function("delete_file", "Delete a file.", path=_PATH),
    function("run_tests", "Run the repository's tests."),
    function("submit", "Hand in the repository as it is now; this ends the task."),
)


class CodeRepair(ToolEnvironment):
    """One repository. Reward for the state it is handed in in, none for one that is never handed in."""

    version: ClassVar[str] = "1"
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = TOOLS

    def __init__(self, options: CodeRepairOptions, runner: CodeRunner) -> None:
        super().__init__(options.max_turns, show_tools=options.show_tools)
        self._options = options
        self._runner = runner
        self._repair: RepairTask | None = None
        self._workspace = Workspace({})
        self._instance = ""
        self._edits = self._test_runs = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Say what is wrong."""
        self._begin(task)
        return opening(self._task, self._options)

    def state(self) -> dict[str, Any]:
        """Turns, and the files that have changed."""
        return {"turns": self.turns, "changes": self._workspace.changes}

    async def restore(self, task: Task, state: dict[str, Any]) -> None:
        """Go on with the repository after those changes."""
        self._begin(task)
        self.turns = state["turns"]
        self._workspace.apply(state["changes"])

    async def step(self, action: str) -> StepResult:
        """One turn; what it did is counted. Each edit, and the end, brings all changes so far as a patch."""
        self._edits = self._test_runs = 0
        result = await super().step(action)
        parts = {
            **result.info["reward_parts"],
            "edits": float(self._edits),
            "test_runs": float(self._test_runs),
        }
        info = {**result.info, "reward_parts": parts}
        if self._edits or result.terminated or result.truncated:
            info |= {"patch": self._workspace.patch(), "instance_id": self._instance}
        return StepResult(result.observation, result.reward, result.terminated, result.truncated, info)

    async def call(self, call: ToolCall) -> str | StepResult:
        """What a function shows; ``submit`` ends the episode."""
        arguments = call.arguments
        try:
            match call.name:
                case "list_files":
                    return self._workspace.listing()
                case "read_file":
                    return self._workspace.read(arguments["path"], self._options.max_read_chars)
                case "replace_text":
                    self._workspace.replace(arguments["path"], arguments["old"], arguments["new"])
                case "write_file":
                    self._workspace.write(arguments["path"], arguments["content"])
                case "delete_file":
                    self._workspace.delete(arguments["path"])
                case "run_tests":
                    return await self._run_tests()
                case _:
                    return await self._submit()
        except Refused as error:
            return f"error: {error}"
        self._edits += 1
        return "done"

    async def answer(self, text: str) -> StepResult:
        """A turn without a call says that the work is done."""
        return await self._submit()

    @property
    def _task(self) -> RepairTask:
        if self._repair is None:
            raise RuntimeError("reset comes before step")
        return self._repair

    def _begin(self, task: Task) -> None:
        if self._repair is not None:
            raise RuntimeError("an environment serves one episode: make a new one")
        repair: RepairTask = task.data["repair"]
        self._repair = repair
        self._instance = str(task.data.get("instance_id", task.key))
        self._workspace = Workspace(repair.files)

    async def _run_tests(self) -> str:
        files = self._workspace.files
        paths = [path for path in sorted(files) if is_test_file(path) and path.endswith(".py")]
        paths = [path for path in paths if path.rpartition("/")[2].startswith("test_") or path.endswith("_test.py")]
        self._test_runs += 1
        if not paths:
            return "there are no tests"
        check = self._task.check
        own = isinstance(check, HiddenTests)
        test_runner = check.runner if isinstance(check, HiddenTests) else "unittest"
        run: TestRun = await run_tests(self._runner, files, paths, test_runner, self._options.limits, packages=own)
        if run.broke:
            raise SandboxBroke(f"the sandbox broke while tests ran: {run.broke}")
        return report(run)

    async def _submit(self) -> StepResult:
        partial = self._options.reward == "partial"
        limits = self._options.limits
        verdict = await judge(self._runner, self._task, self._workspace.files, limits, gain=partial)
        parts = {
            "solved": float(verdict.solved),
            "hidden_passed": verdict.hidden_passed / max(1, verdict.hidden_total),
        }
        reward = verdict.gained if partial else float(verdict.solved)
        return StepResult(reward=reward, terminated=True, info={"reward_parts": parts})


def opening(task: RepairTask, options: CodeRepairOptions) -> tuple[Message, ...]:
    """What the policy reads first."""
    if options.instructions:
        return (Message(Role.USER, task.request),)
    return (Message(Role.USER, "\n".join(sorted(task.files))),)
