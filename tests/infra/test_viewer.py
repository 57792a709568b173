"""The page of a trajectory shows what is stored, and whatever a trajectory says stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from infra_fixtures import LEASE_S, TRAIN

from flows.cli import main
from infra.ledger import Ledger, NewRequest
from infra.objects import ObjectStore, ObjectStoreError
from infra.policy_store import PolicyStore
from infra.settings import Settings
from infra.trajectory_store import TrajectoryStore
from infra.update_records import write_update_tokens
from infra.viewer import trajectory_page, trajectory_view
from infra.viewer.page import CHUNK_TOKENS, chunks
from sao_core.models.tiny import build_tokenizer
from sao_core.rollout.engine import Sampled, StopReason
from sao_core.rollout.recorder import Circumstances, Recorder
from sao_core.trajectory import Message, Outcome, Purpose, Role, Trajectory

TOKENIZER = build_tokenizer()
ID = "r-0-1-0"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "<!--<script>",
    "]]></style><svg onload=alert(3)>",
    "\"'` onmouseover=alert(4) x=&quot;",
    "a\u2028b\u2029c",
    "abc\u202egnp.exe\u2066",
    "nul\x00 escape\x1b[2J",
    "javascript:alert(5) {{ 7*7 }} {% raw %}",
    "tag\U000e0041",
)
EVERYTHING = "\n".join(HOSTILE)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def act(recorder: Recorder, text: str, versions: list[int] | None = None) -> None:
    said = np.array(ids(text), np.int32)
    logprobs = -np.linspace(0.01, 2.0, len(said), dtype=np.float32)
    drawn = np.array(versions or [3] * len(said), np.int32)
    recorder.act(Sampled(said, logprobs, drawn, StopReason.STOP_TOKEN))


class Home:
    """A run with a policy, and one recorded rollout that asks, is answered, and answers."""

    def __init__(self, places: Settings, prompt: str = "find 1 plus 2", key: str = "train/0") -> None:
        self.places = places
        self.ledger, self.objects = Ledger(places.database_url), ObjectStore.from_settings(places)
        self.ledger.create_run("r", "tiny", "sao", {"rollout": {"max_attempts": 3}})
        self.ledger.begin_attempt("r")
        TOKENIZER.save_pretrained(places.home / "policy")
        policies = PolicyStore(self.objects, self.ledger, places.cache)
        self.ledger.add_policy("r", policies.put("r", 0, places.home / "policy"), step=0)
        self.ledger.issue("r", [NewRequest(Purpose.TRAIN, key)])
        self.trajectory = self._record(prompt)

    def _record(self, prompt: str) -> Trajectory:
        (request,) = self.ledger.lease("r", "w", TRAIN, 1, LEASE_S)
        recorder = Recorder(request, Circumstances("recompute", "hash", "calculator", "1", 0, "2"))
        recorder.messages.append(Message(Role.USER, prompt))
        recorder.start_segment(Role.USER, ids(f"<|user|>{prompt}<|end|>"))
        act(recorder, "calc: 1+2")
        recorder.reward(0.25)
        recorder.messages.append(Message(Role.TOOL, prompt))
        recorder.observe(Role.TOOL, ids(prompt))
        said = f"answer: 3{prompt}"
        count = len(ids(said))
        act(recorder, said, [3] * (count // 2) + [4] * (count - count // 2))
        recorder.reward(0.5)
        recorder.reward_parts = {"answer": 0.75}
        rollout = recorder.rollout(Outcome.COMPLETED, "answered", {"duration_s": 1.5, "generation_s": 1.25})
        rows = TrajectoryStore(self.objects).write("runs/r/trajectories/1.parquet", [rollout])
        assert self.ledger.record("r", "w", rows) == [ID]
        return rollout[0]

    def train(self, **columns: Any) -> dict[str, Any]:
        """Commit a step that trained on the rollout; what the learner recorded of its tokens."""
        generator = np.random.default_rng(0)
        count = self.trajectory.num_tokens
        recorded = {
            "logprobs": np.where(self.trajectory.action_mask, generator.normal(-1, 0.5, count), 0).astype(np.float32),
            "advantages": generator.normal(0, 1, count).astype(np.float32),
            "values": generator.normal(0.5, 0.2, count).astype(np.float32),
            "kept": self.trajectory.action_mask & (generator.random(count) < 0.7),
        } | columns
        self.ledger.claim("r", 1, 1)
        self.ledger.commit_update("r", 1, 0, 0, {}, [ID], {}, None)
        write_update_tokens(self.objects, "r", 1, {ID: recorded})
        return recorded

    def view(self) -> dict[str, Any]:
        return trajectory_view(self.ledger, self.places, ID)


class Page(HTMLParser):
    """What a browser would make of a page: elements, their attributes, and the text in each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.comments: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads."""
        return json.loads(self.texts["script"][0])

    @property
    def policy(self) -> dict[str, str]:
        (content,) = (a["content"] for _, a in self.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert content is not None
        return dict(rule.split(" ", 1) for rule in content.split("; "))


@pytest.fixture
def places(tmp_path: Path, migrated_sqlite: Path) -> Settings:
    places = Settings.from_environment({}, directory=tmp_path)
    places.home.mkdir()
    shutil.copy(migrated_sqlite, places.home / "ledger.db")
    return places


@pytest.fixture
def home(places: Settings) -> Iterator[Home]:
    home = Home(places)
    yield home
    home.ledger.close()


def test_the_view_has_the_stored_numbers_exactly(home: Home) -> None:
    recorded, stored = home.train(), home.trajectory
    view = home.view()
    sampled = [token for token in view["tokens"] if token["action"]]
    mask = stored.action_mask
    assert [token["id"] for token in view["tokens"]] == stored.token_ids.tolist()
    assert [token["action"] for token in view["tokens"]] == mask.tolist()
    for name, column in {
        "logprob": stored.behavior_logprobs,
        "version": stored.policy_versions,
        "reward": stored.rewards,
        "advantage": recorded["advantages"],
        "value": recorded["values"],
        "ratio": np.exp(recorded["logprobs"] - stored.behavior_logprobs),
        "kept": recorded["kept"],
    }.items():
        assert [token[name] for token in sampled] == column[mask].tolist(), name
    assert (view["versions"], view["reward_parts"], view["trained_step"]) == ([3, 4], {"answer": 0.75}, 1)
    assert view["objective"] == "keeps ratios in (0.70, 6.00)"
    assert [message["role"] for message in view["messages"]] == ["user", "tool"]


def test_the_page_has_the_stored_numbers_to_four_decimals(home: Home) -> None:
    recorded, stored = home.train(), home.trajectory
    data = Page(trajectory_page(home.view())).data
    mask = stored.action_mask
    assert "".join(data["text"]) == TOKENIZER.decode(stored.token_ids)
    assert data["id"] == stored.token_ids.tolist()
    assert [i for start, stop in data["sampled"] for i in range(start, stop)] == np.flatnonzero(mask).tolist()
    ratio = np.exp(recorded["logprobs"] - stored.behavior_logprobs)
    columns = {"logprob": stored.behavior_logprobs, "ratio": ratio, "value": recorded["values"]}
    for name, column in (columns | {"advantage": recorded["advantages"]}).items():
        np.testing.assert_allclose(data[name], column[mask], rtol=0, atol=5.001e-5, err_msg=name)
    assert [letter == "1" for letter in data["kept"]] == recorded["kept"][mask].tolist()
    swap = int(np.flatnonzero(stored.policy_versions == 4)[0])
    assert data["versions"] == [[int(np.flatnonzero(mask)[0]), 3], [swap, 4]]
    assert data["rewards"] == [[int(i), float(stored.rewards[i])] for i in np.flatnonzero(stored.rewards)]
    assert [data["text"][i] for i in data["special"]] == ["<|user|>", "<|end|>"]


def test_a_step_that_moved_the_critic_only_rejects_nothing(home: Home) -> None:
    blank = np.zeros(home.trajectory.num_tokens, np.float32)
    home.train(logprobs=blank, kept=blank.astype(bool))
    view = home.view()
    page = Page(trajectory_page(view))
    assert view["policy_updated"] is False
    assert {token.get("ratio") for token in view["tokens"]} == {None}
    assert (page.data["kept"], page.data["ratio"]) == (None, None)
    assert page.data["advantage"] is not None
    assert any("moved the critic only" in text for text in page.texts["p"])


def test_a_trajectory_that_nobody_trained_on_has_a_page(home: Home) -> None:
    page = Page(trajectory_page(home.view()))
    assert [page.data[name] for name in ("ratio", "advantage", "value", "kept")] == [None] * 4
    assert any("were not kept" in text for text in page.texts["p"])


def test_a_segment_is_shown_by_itself(home: Home) -> None:
    home.ledger.issue("r", [NewRequest(Purpose.TRAIN, "train/1")])
    (request,) = home.ledger.lease("r", "w", TRAIN, 1, LEASE_S)
    recorder = Recorder(request, Circumstances("recompute", "hash", "calculator", "1", 0, "2"))
    for question, answer in (("find 1", "calc: 1"), ("find 2", "answer: 2")):
        recorder.start_segment(Role.USER, ids(question))
        act(recorder, answer)
    recorder.reward(1.0)
    rollout = recorder.rollout(Outcome.COMPLETED, "answered", {})
    rows = TrajectoryStore(home.objects).write("runs/r/trajectories/2.parquet", [rollout])
    home.ledger.record("r", "w", rows)
    view = trajectory_view(home.ledger, home.places, "r-1-1-1")
    assert "".join(token["text"] for token in view["tokens"]) == "find 2answer: 2"
    assert "1 (of 0 to 1)" in Page(trajectory_page(view)).texts["bdi"]


def test_the_conversation_can_be_read_without_the_script(home: Home) -> None:
    page = Page(trajectory_page(home.view()))
    assert "".join(page.texts["span"]).count("calc: 1+2") == 1
    assert "find 1 plus 2" in "".join(page.texts["span"])
    turns = [attributes for tag, attributes in page.elements if "turn" in (attributes.get("class") or "").split()]
    assert [turn["class"] for turn in turns] == ["turn world", "turn policy", "turn world", "turn policy"]


def test_hostile_text_is_text_everywhere(places: Settings) -> None:
    home = Home(places, prompt=EVERYTHING, key=EVERYTHING)
    view = home.view()
    assert EVERYTHING in "".join(token["text"] for token in view["tokens"])
    assert view["prompt_key"] == EVERYTHING
    hostile = view | dict.fromkeys(("trajectory_id", "run_id", "stop_reason", "difficulty", "object"), EVERYTHING)
    hostile |= {"algorithm": EVERYTHING, "objective": EVERYTHING, "state": EVERYTHING, "outcome": EVERYTHING}
    hostile |= {"environment": {"name": EVERYTHING, "version": EVERYTHING, "seed": EVERYTHING}, "policy_updated": True}
    hostile |= {"reward_parts": {EVERYTHING: 1.0}, "purpose": EVERYTHING, "on_swap": EVERYTHING}
    hostile |= {"reject_reason": EVERYTHING, "renderer_hash": EVERYTHING}
    hostile["messages"] = [{"role": EVERYTHING, "content": EVERYTHING}]
    hostile["turns"] = [turn | {"role": EVERYTHING} for turn in view["turns"]]
    tame, wild = trajectory_page(view | {"policy_updated": True}), trajectory_page(hostile)
    page = Page(wild)
    known = {tag for tag, _ in Page(tame).elements}
    assert {tag for tag, _ in page.elements} <= known
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert page.comments == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028-\u202e\u2066-\u2069\U000e0041]", wild)
    assert not re.search("[<>&]", page.texts["script"][0])
    assert "49" not in "".join(page.texts["title"])
    assert "abc‹U+202E›gnp.exe‹U+2066›" in "".join(page.texts["title"])
    assert "nul‹NUL› escape‹ESC›[2J" in "".join(page.data["text"])
    assert json.loads(json.dumps(page.data)) == page.data


def test_what_is_no_character_can_be_written(home: Home) -> None:
    view = home.view() | {"stop_reason": "half \ud83d of a pair"}
    page = trajectory_page(view).encode("utf-8").decode()
    assert "half ‹U+D83D› of a pair" in page


def test_the_page_runs_its_own_script_only_and_loads_nothing(home: Home) -> None:
    text = trajectory_page(home.view())
    page = Page(text)
    own = {
        tag: f"'sha256-{base64.b64encode(hashlib.sha256(page.texts[tag][-1].encode()).digest()).decode()}'"
        for tag in ("script", "style")
    }
    assert page.policy["default-src"] == "'none'"
    assert page.policy["script-src"] == own["script"]
    assert page.policy["style-src"] == own["style"]
    assert "unsafe" not in " ".join(page.policy.values())
    assert not re.search(r"https?:|//\w+\.|@import|url\(", text)
    assert not {"src", "href", "style", "action"} & {name for _, attributes in page.elements for name in attributes}
    assert "innerHTML" not in page.texts["script"][-1]


def test_a_long_turn_is_cut_into_chunks_and_stays_compact(home: Home) -> None:
    home.train()
    view = home.view()
    tokens = [token | {"version": 3, "reward": 0.0} for token in view["tokens"] if token["action"]] * 900
    long = view | {"tokens": tokens, "turns": [{"role": "assistant", "start": 0, "stop": len(tokens)}], "messages": []}
    assert len(tokens) > 8000
    short = trajectory_page(long | {"tokens": tokens[:1], "turns": [{"role": "assistant", "start": 0, "stop": 1}]})
    assert len(trajectory_page(long)) - len(short) < 60 * len(tokens)


def test_chunks_end_at_a_new_version_after_a_reward_and_at_their_size() -> None:
    versions = [1] * 10 + [2] * (CHUNK_TOKENS + 20)
    tokens = [{"text": "x", "action": True, "version": version, "reward": 0.0} for version in versions]
    tokens[4]["reward"] = 0.5
    found = chunks(tokens, {"start": 0, "stop": len(tokens)})
    assert [(c.start, c.stop) for c in found] == [
        (0, 5),
        (5, 10),
        (10, 10 + CHUNK_TOKENS),
        (10 + CHUNK_TOKENS, len(tokens)),
    ]
    assert [(c.version, c.swapped, c.reward) for c in found] == [
        (1, False, 0.5),
        (None, False, 0.0),
        (2, True, 0.0),
        (None, False, 0.0),
    ]


def test_damage_is_an_error_that_names_the_object(home: Home) -> None:
    home.objects.put("runs/r/trajectories/1.parquet", b"no parquet")
    with pytest.raises(ObjectStoreError, match=r"object damaged: runs/r/trajectories/1\.parquet"):
        home.view()


def test_a_tokenizer_that_is_not_the_published_one_is_refused(home: Home) -> None:
    key = f"{home.ledger.policy('r', 0).object_key}/tokenizer.json"
    home.objects.put(key, b"{}")
    with pytest.raises(ObjectStoreError, match=r"tokenizer\.json is damaged"):
        home.view()


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch, home: Home) -> int:
    monkeypatch.setenv("SAO_HOME", str(home.places.home))
    monkeypatch.chdir(home.places.home)
    monkeypatch.setattr("sys.argv", ["sao", "trajectory", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("file", [None, "named.html", "-"])
def test_the_command_writes_the_page(
    file: str | None, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [ID, "--html"] if file is None else [ID, "--html", file]
    assert command(*arguments, monkeypatch=monkeypatch, home=home) == 0
    said, expected = capsys.readouterr().out, trajectory_page(home.view())
    if file == "-":
        assert said == expected
    else:
        assert said == f"{file or f'{ID}.html'}\n"
        assert (home.places.home / said.strip()).read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["r-9-1-0", "--html"], "there is no trajectory 'r-9-1-0'"),
        ([ID, "--html", "missing/x.html"], "missing/x.html cannot be written: No such file or directory"),
        ([ID, "--html", "--json"], "--html and --json exclude each other"),
        ([ID, "x.html"], "x.html is written with --html only"),
    ],
)
def test_bad_input_to_the_command_is_one_line(
    arguments: list[str],
    expected: str,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(*arguments, monkeypatch=monkeypatch, home=home) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error
    assert error.count("\n") == 1
