"""A rollout that is there only as parts is shown as far as it got."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flows.trajectory_view import print_trajectory
from infra.ledger import Ledger, NewRequest
from infra.objects import ObjectStore
from infra.policy_store import PolicyStore
from infra.rollout_parts import write_part
from infra.settings import Settings
from infra.viewer import trajectory_page, trajectory_view
from sao_core.config import ConfigError
from sao_core.models.tiny import build_tokenizer
from sao_core.protocols import RolloutRequest
from sao_core.rollout.engine import Sampled, StopReason
from sao_core.rollout.recorder import Circumstances, Recorder
from sao_core.trajectory import Message, Purpose, Role

TOKENIZER = build_tokenizer()
CIRCUMSTANCES = Circumstances("recompute", "hash", "calculator", "1", 0, "2")
TIMINGS = {"started_at": 0.0, "duration_s": 1.0, "environment_s": 0.0, "generation_s": 1.0}


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def say(recorder: Recorder, text: str) -> None:
    said = np.array(ids(text), np.int32)
    count = len(said)
    recorder.act(Sampled(said, np.full(count, -0.5, np.float32), np.full(count, 3, np.int32), StopReason.DEADLINE))


def put(ledger: Ledger, objects: ObjectStore, recorder: Recorder) -> None:
    part = recorder.part(TIMINGS)
    assert part is not None
    recorder.put()
    assert ledger.record_part("r", "w", write_part(objects, "w", part))


@pytest.fixture
def places(tmp_path: Path) -> Settings:
    """A run with a policy and a request of which two parts are stored: a call, and the beginning of an answer."""
    places = Settings.from_environment({}, directory=tmp_path)
    ledger, objects = Ledger(places.database_url), ObjectStore.from_settings(places)
    ledger.create_run("r", "tiny", "sao", {"rollout": {"max_attempts": 3}})
    ledger.begin_attempt("r")
    TOKENIZER.save_pretrained(tmp_path / "policy")
    policies = PolicyStore(objects, ledger, places.cache)
    ledger.add_policy("r", policies.put("r", 0, tmp_path / "policy"), step=0)
    ledger.issue("r", [NewRequest(Purpose.TRAIN, "train/0")])
    (request,) = lease(ledger)
    recorder = Recorder(request, CIRCUMSTANCES)
    recorder.messages.append(Message(Role.USER, "find 1 plus 2"))
    recorder.start_segment(Role.USER, ids("find 1 plus 2"))
    say(recorder, "calc: 1+2 ")
    put(ledger, objects, recorder)
    recorder.reward(0.25)
    recorder.observe(Role.TOOL, ids("3"))
    say(recorder, "answer: 34")
    put(ledger, objects, recorder)
    return places


def lease(ledger: Ledger) -> list[RolloutRequest]:
    return ledger.lease("r", "w", [Purpose.TRAIN], 1, 30.0)


def shown(ledger: Ledger, places: Settings, trajectory_id: str) -> str:
    console = Console(force_terminal=False, width=200, file=io.StringIO())
    print_trajectory(trajectory_view(ledger, places, trajectory_id), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("state", ["open", "failed"])
def test_parts_are_shown_as_one_unfinished_trajectory(places: Settings, state: str) -> None:
    ledger = Ledger(places.database_url)
    if state == "failed":
        ledger.fail_attempt("r", "w", 0, 1, "sandbox lost")  # neither part has a state to restore
    text = shown(ledger, places, "r-0-1-0")
    assert text.splitlines()[0] == f"r-0-1-0  train  unfinished (2 parts)  {state}  score 0.25"
    assert "calc: 1+2 " in text
    found: dict[str, Any] = trajectory_view(ledger, places, "r-0-1-0")
    assert (found["state"], found["parts"], found["outcome"], found["score"]) == ("unfinished", 2, None, 0.25)
    assert [turn["role"] for turn in found["turns"]] == ["user", "assistant", "tool", "assistant"]
    assert "".join(token["text"] for token in found["tokens"]) == "find 1 plus 2calc: 1+2 3answer: 3"
    assert [token["reward"] for token in found["tokens"] if token["action"] and token["reward"]] == [0.25]


def test_the_page_of_an_unfinished_trajectory_says_how_far_it_got(places: Settings) -> None:
    page = trajectory_page(trajectory_view(Ledger(places.database_url), places, "r-0-1-0"))
    assert "<li><b>unfinished</b> 2 parts, open</li>" in page
    assert "answer: 3" in page
    assert "were not kept" not in page


def test_what_an_attempt_made_since_it_started_anew_is_shown(places: Settings) -> None:
    ledger, objects = Ledger(places.database_url), ObjectStore.from_settings(places)
    ledger.release("r", "w")
    (request,) = lease(ledger)
    assert (request.attempt, request.parts) == (1, 0)
    recorder = Recorder(request, CIRCUMSTANCES)
    recorder.start_segment(Role.USER, ids("find 1 plus 2"))
    say(recorder, "hello")
    put(ledger, objects, recorder)
    assert shown(ledger, places, "r-0-1-0").startswith("r-0-1-0  train  unfinished (1 part)  open  score 0\n")


@pytest.mark.parametrize("wrong", ["r-0-1-1", "r-0-2-0", "r-1-1-0", "x-0-1-0", "r", "r-0-1-zero"])
def test_an_id_that_is_nowhere_is_refused(places: Settings, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no trajectory '{wrong}'"):
        trajectory_view(Ledger(places.database_url), places, wrong)
