"""Settings of the `code_repair` environment."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sao_core.config import Section
from sao_core.environments.code_repair.levels import Level
from sao_core.outside import Limits


class CodeRepairOptions(Section):
    """Bundled tasks unless ``path`` names your own."""

    levels: tuple[Level, ...] = Field(
        tuple(Level),
        description="Difficulties of the bundled tasks, in turn; one that is named twice comes twice as often.",
    )
    train_tasks: int | None = Field(
        None,
        ge=1,
        description="Bundled training tasks, gone through in shuffled epochs; empty makes a new one each time. "
        "Baselines that keep a mean per prompt need tasks that come back.",
    )
    path: str | None = Field(
        None,
        description="Your own tasks: a JSON Lines file, or a folder with a folder per task; empty: the bundled ones.",
    )
    evaluation_path: str | None = Field(
        None,
        description="Your own tasks to evaluate on, in the same form; empty: some of those in `path` are held out.",
    )
    held_out_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of your own tasks that is only evaluated, at least one, without an evaluation_path.",
    )
    test_runner: Literal["unittest", "pytest"] = Field(
        "unittest", description="What runs the tests of your own tasks; pytest must be installed beside this package."
    )
    reward: Literal["solved", "partial"] = Field(
        "solved",
        description="solved: 1 if all hidden and visible tests pass, else 0. partial: of the hidden tests that the "
        "broken version fails, the share that pass beyond those it passed.",
    )
    max_turns: int = Field(
        300,
        ge=1,
        description="Turns after which the environment ends an episode without a reward. Tokens have their budget in "
        "rollout.max_action_tokens, and rollout.max_turns counts too.",
    )
    show_tools: bool = Field(
        True, description="Show the functions in the prompt; a warm-started tiny model knows them already."
    )
    instructions: bool = Field(
        True, description="Say what to do and where the tests are; without, only name the files."
    )
    max_read_chars: int = Field(
        16_000, ge=200, description="Longest text that reading a file shows; the middle of a longer one is left out."
    )
    test_wall_s: float = Field(10.0, gt=0, description="Longest that a run of tests, and the final check, may take.")
    memory_mb: int = Field(512, ge=64, description="Memory that a run of tests may use, in MiB.")
    right_fix: tuple[float, float, float] = Field(
        (0.6, 0.4, 0.25), description="How often the demonstrator finds the right fix: easy, medium, hard."
    )

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if not self.levels:
            raise ValueError(f"levels must name at least one of {', '.join(Level)}")
        if self.evaluation_path is not None and self.path is None:
            raise ValueError("evaluation_path needs a path to train on")
        if not all(0 <= rate <= 1 for rate in self.right_fix):
            raise ValueError(f"right_fix must hold probabilities: got {self.right_fix}")
        return self

    @property
    def limits(self) -> Limits:
        """What a run of tests may use."""
        return Limits(wall_s=self.test_wall_s, cpu_s=self.test_wall_s, memory_bytes=self.memory_mb * 2**20)
