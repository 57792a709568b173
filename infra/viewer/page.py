"""A trajectory as one HTML page that loads nothing and runs nothing but its own script.

The conversation is in the page as text and can be read without the script, which divides it into tokens where somebody
looks. Whatever a trajectory says is text: escaped in the markup, and in the data that the script reads, where no
``<`` is left. A policy in the page (its hashes made here) forbids every other script, style, image and request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from infra.viewer.visible import visible
from sao_core.trajectory import Role

CHUNK_TOKENS = 256
"""Tokens that the script divides at once."""
LONG_TOKENS = 5000
"""A trajectory of more is divided, and laid out, only where somebody looks."""
DECIMALS = 4
"""Of the numbers of a token in the page; `sao trajectory ID --json` has them as they are stored."""

_COLUMNS = ("logprob", "ratio", "advantage", "value")


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start:stop`` of a turn as text, with what stands before and after them."""

    start: int
    stop: int
    text: str
    version: int | None
    """The policy version that goes on from here, where it was another one before, or the turn begins."""
    swapped: bool
    """Whether the version changed in the middle of the turn."""
    reward: float
    """Placed on the last of these tokens; mostly 0."""


def trajectory_page(view: Mapping[str, Any]) -> str:
    """The page of a :func:`infra.viewer.trajectory_view`; the same view gives the same page."""
    script, style = _asset("viewer.js"), _asset("viewer.css")
    return _template().render(
        policy=_policy(script, style),
        script=Markup(script),
        style=Markup(style),
        data=Markup(_embedded(columns(view))),
        view=view,
        long=len(view["tokens"]) > LONG_TOKENS,
        facts=list(facts(view)),
        origin=list(origin(view)),
        turns=[{**turn, "chunks": chunks(view["tokens"], turn)} for turn in view["turns"]],
    )


def columns(view: Mapping[str, Any]) -> dict[str, Any]:
    """What the script knows of the tokens, in columns.

    ``text`` (see :func:`visible`) and ``id`` have an entry per token; ``logprob``, ``ratio``, ``advantage`` and
    ``value`` one per sampled token (None: no such column), as ``kept`` has a letter, 1 or 0. ``sampled`` has the spans
    of sampled tokens, ``versions`` and ``rewards`` pairs of a token's place and what begins or lies there, ``special``
    and ``continues`` the places of such tokens.
    """
    tokens: Sequence[Mapping[str, Any]] = view["tokens"]
    sampled = [token for token in tokens if token["action"]]
    judged = view["policy_updated"] and all("kept" in token for token in sampled)
    return {
        "text": [visible(token["text"]) for token in tokens],
        "id": [token["id"] for token in tokens],
        "sampled": list(_spans(tokens)),
        **{name: _column(sampled, name) for name in _COLUMNS},
        "kept": "".join("01"[token["kept"]] for token in sampled) if judged else None,
        "versions": list(_versions(tokens)),
        "rewards": [[place, _rounded(token["reward"])] for place, token in enumerate(tokens) if token.get("reward")],
        "special": [place for place, token in enumerate(tokens) if token.get("special")],
        "continues": [place for place, token in enumerate(tokens) if token.get("continues")],
    }


def chunks(tokens: Sequence[Mapping[str, Any]], turn: Mapping[str, Any]) -> list[Chunk]:
    """A turn in pieces that end where the policy version changes, after a reward, or after `CHUNK_TOKENS`."""
    found: list[Chunk] = []
    start, before = turn["start"], None
    for place in range(turn["start"], turn["stop"]):
        following = tokens[place + 1] if place + 1 < turn["stop"] else None
        version, reward = tokens[place].get("version"), tokens[place].get("reward", 0.0)
        swap = following is not None and following.get("version", version) != version
        if following is None or swap or reward or place + 1 - start == CHUNK_TOKENS:
            text = visible("".join(token["text"] for token in tokens[start : place + 1]))
            begins = None if version == before else version
            found.append(Chunk(start, place + 1, text, begins, begins is not None and before is not None, reward))
            start, before = place + 1, version
    return found


def facts(view: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What to know of the whole first, as pairs of a name and a text; an empty one is not shown."""
    environment, (oldest, newest) = view["environment"], view["versions"]
    yield "prompt", view["prompt_key"]
    yield "difficulty", view["difficulty"]
    yield "environment", _joined(environment["name"], environment["version"])
    yield "reward parts", ", ".join(f"{name} {_short(value)}" for name, value in view["reward_parts"].items())
    yield "tokens", f"{view['num_tokens']}, {view['num_action_tokens']} sampled in {_turns(view['num_turns'])}"
    yield "policy version", f"{oldest}" if oldest == newest else f"{oldest} to {newest}, cache: {view['on_swap']}"
    yield "took", _took(view["timings"])
    if view["num_segments"] > 1:
        yield "segment", f"{view['segment']} (of 0 to {view['num_segments'] - 1})"
    if view["rewound"]:
        yield "ready again", "since a step that trained on it was undone"


def origin(view: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How it came about and where it lies, as pairs like those of :func:`facts`."""
    yield "algorithm", _joined(view["algorithm"], view["objective"] and f"({view['objective']})")
    yield "sampling", _sampling(view["sampling"])
    yield "environment seed", str(view["environment"]["seed"])
    yield "request", _joined(view["request_number"], attempt=view["attempt"], group=view["group"])
    yield "recorded", _moment(view["recorded_at"])
    yield "tokenizer and template", view["renderer_hash"][:12]
    yield "object", view["object"]


def _joined(*words: Any, **named: Any) -> str:
    texts = [str(word) for word in words if word not in (None, "")]
    return " ".join(texts + [f"· {name} {value}" for name, value in named.items() if value is not None])


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"


def _sampling(sampling: Mapping[str, Any]) -> str:
    if sampling["greedy"]:
        return "greedy"
    top_k = f"top-k {sampling['top_k']}" if sampling["top_k"] else "top-k off"
    return f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, {top_k}"


def _took(timings: Mapping[str, Any]) -> str:
    whole = timings.get("duration_s")
    inside = [f"{name} {timings[key]:.2f} s" for name, key in _INSIDE.items() if timings.get(key) is not None]
    return "" if whole is None else f"{whole:.2f} s" + (f" ({', '.join(inside)})" if inside else "")


_INSIDE = {"generation": "generation_s", "environment": "environment_s"}


def _moment(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC" if seconds else ""


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _spans(tokens: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    for sampled, group in groupby(range(len(tokens)), lambda place: tokens[place]["action"]):
        places = list(group)
        if sampled:
            yield [places[0], places[-1] + 1]


def _versions(tokens: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    before = None
    for place, token in enumerate(tokens):
        if token["action"] and token["version"] != before:
            before = token["version"]
            yield [place, before]


def _column(sampled: Sequence[Mapping[str, Any]], name: str) -> list[float | None] | None:
    column = [_rounded(token.get(name)) for token in sampled]
    return None if all(value is None for value in column) else column


def _rounded(value: float | None) -> float | int | None:
    """With `DECIMALS`, and as short in JSON as can be."""
    if value is None or not math.isfinite(value):
        return None
    rounded = round(value, DECIMALS)
    return int(rounded) if rounded.is_integer() else rounded


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it is in, nor be taken for markup: ASCII without ``<``, ``>``, ``&``."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(value: Any) -> Any:
    """What stands in the page for a value: text as it can be seen, before it is escaped."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


@cache
def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["short"] = _short
    environment.tests["sampled"] = lambda role: role == Role.ASSISTANT
    return environment.from_string(_asset("viewer.html"))
