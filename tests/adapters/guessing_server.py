"""A server written with OpenEnv's own library: guess a number from its seed; run by the Python that has openenv."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int
    comment: str = ""


class Hint(Observation):
    text: str
    tries: int


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self.secret = (seed or 0) % more.get("limit", 10)
        self._state = State(step_count=0)
        return Hint(text=f"below {more.get('limit', 10)}", tries=0)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        self._state.step_count += 1
        if action.number < 0:
            raise OSError("the die fell off the table")
        right = action.number == self.secret
        text = "right" if right else "more" if action.number < self.secret else "less"
        return Hint(text=text, tries=self._state.step_count, done=right, reward=1.0 if right else -0.1)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=2)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
