"""The environment that the docs teach to write works as it stands there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from sao_core.environments import get
from sao_core.outside import Outside

DOCS = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def own_environment() -> str:
    """The module in the docs."""
    section = DOCS.read_text().split("## Write your own in 30 lines")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_it_has_at_most_thirty_lines() -> None:
    assert len([line for line in own_environment().splitlines() if line.strip()]) <= 30


def test_it_asks_and_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "backwards.py").write_text(own_environment())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "backwards", raising=False)
    spec = get("backwards:SPEC")
    options = spec.parse_options({"letters": 4})
    tasks = spec.tasks(options, 0)
    task = tasks.task(tasks.key_at(7))
    assert task.key not in tasks.evaluation_keys(100)
    assert spec.tasks(options, 0).task(task.key).data == task.data

    async def judged(action: str) -> float:
        episode = spec.episode(options, task, Outside())
        (asked,) = await episode.reset(task)
        assert len(asked.content) == 4
        return (await episode.step(action)).reward

    word = task.data["word"]
    assert asyncio.run(judged(word[::-1])) == 1.0
    assert asyncio.run(judged(word + "!")) == 0.0
