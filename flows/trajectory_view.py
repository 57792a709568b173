"""One trajectory in a terminal: its turns, and each action token with what the learner saw and made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.viewer import trajectory_page, visible
from sao_core.config import ConfigError
from sao_core.trajectory import Role

STDOUT = Path("-")


def print_trajectory(view: Mapping[str, Any], console: Console) -> None:
    """Turn by turn; action tokens green where the advantage is positive, red where negative, struck where rejected."""
    console.print(visible(_heading(view)), highlight=False, markup=False)
    for turn in view["turns"]:
        tokens = view["tokens"][turn["start"] : turn["stop"]]
        if turn["role"] != Role.ASSISTANT:
            console.print(Text(f"\n{turn['role']}", style="bold dim"))
            console.print(Text(visible("".join(token["text"] for token in tokens)).strip(), style="dim"))
            continue
        console.print(Text(f"\n{turn['role']}", style="bold"))
        line = Text()
        for token in tokens:
            line.append(visible(token["text"]), style=_style(view, token))
        console.print(line)
        console.print(_token_table(view, tokens))
    if not view["recorded_tokens"] and not view["parts"]:
        console.print(
            "advantages and values were not kept for this trajectory (learner.record_tokens=all keeps them)",
            style="dim",
        )


def write_page(view: Mapping[str, Any], file: Path | None, console: Console) -> None:
    """Write the page to ``file``, by default `ID.html` in the working directory; `-` prints it.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = trajectory_page(view)
    if file == STDOUT:
        console.file.write(page)
        return
    path = file or Path(f"{view['trajectory_id']}.html")
    try:
        path.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from error
    console.print(str(path), highlight=False, markup=False, soft_wrap=True)


def _heading(view: Mapping[str, Any]) -> str:
    which = f"{view['trajectory_id']}  {view['purpose']}  {view['state']}"
    if view["parts"]:
        count = f"{view['parts']} part{'s' if view['parts'] != 1 else ''}"
        return f"{which} ({count})  {view['part_state']}  score {view['score']:g}"
    return f"{which}  score {view['score']:g}  {view['outcome']} ({view['stop_reason']})"


def _style(view: Mapping[str, Any], token: Mapping[str, Any]) -> str:
    advantage = token.get("advantage")
    if advantage is None:
        return ""
    shade = min(255, 90 + int(165 * min(1.0, abs(advantage))))
    colour = f"rgb(60,{shade},60)" if advantage >= 0 else f"rgb({shade},60,60)"
    return f"{colour} strike" if view["policy_updated"] and not token["kept"] else colour


def _token_table(view: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("token", "log-prob", "ratio", "advantage", "value", "version"):
        table.add_column(heading, justify="left" if heading == "token" else "right")
    for token in tokens:
        if not token["action"]:
            continue
        numbers = [token.get(name) for name in ("ratio", "advantage", "value")]
        table.add_row(
            Text(repr(visible(token["text"])), style=_style(view, token)),
            f"{token['logprob']:.3f}",
            *("–" if number is None else f"{number:.3f}" for number in numbers),
            str(token["version"]),
        )
    return table
