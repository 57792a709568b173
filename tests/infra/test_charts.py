"""The charts of a run: the same bytes for the same numbers, a page that loads nothing, and small for long runs."""

from __future__ import annotations

import math
import re
import struct

import pytest

from infra.ledger import EvaluationRecord, UpdateRow
from infra.tracking.charts import chart_html, chart_png


def updates(count: int) -> list[UpdateRow]:
    return [
        UpdateRow(
            step,
            step,
            step + 1,
            64,
            {
                "reward/mean": 0.5 + math.sin(step) / 4,
                "value/explained_variance": -5.0 if step < 3 else 0.5,
                "staleness/mean": 1.0,
                "policy/band_rejected": 0.125,
                "policy/loss": 1.0,
            },
            None,
            0.0,
            0,
        )
        for step in range(1, count + 1)
    ]


def evaluation(number: int, step: int, reward: float) -> EvaluationRecord:
    metrics = {"eval/sums/reward_mean": reward, "eval/sums/greedy_reward_mean": reward + 0.125}
    return EvaluationRecord(number, step, step, "sums", metrics, "0" * 64, 0.0)


EVALUATIONS = [evaluation(1, 0, 0.25), evaluation(2, 40, 0.5)]


def test_the_same_numbers_give_the_same_bytes() -> None:
    png, page = chart_png(updates(40), EVALUATIONS, "tiny-1"), chart_html(updates(40), EVALUATIONS, "tiny-1")
    assert chart_png(updates(40), EVALUATIONS, "tiny-1") == png
    assert chart_html(updates(40), EVALUATIONS, "tiny-1") == page
    assert chart_png(updates(41), EVALUATIONS, "tiny-1") != png
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (960, 580)


def test_the_page_loads_nothing_and_its_title_is_text() -> None:
    page = chart_html(updates(4), EVALUATIONS, "</title><script>alert(1)</script> $x_{y$")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' )>]+", page)) <= names
    assert not re.findall(r"\b(?:src|href)=\"(?!#)", page)
    for panel in ("Reward", "Explained variance", "Staleness", "Rejected by the band", "held out, sampled"):
        assert panel in page


def test_the_page_has_the_last_values() -> None:
    page = chart_html(updates(40), EVALUATIONS, "tiny-1")
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    assert ("staleness/mean", "1", "40") in rows
    assert ("policy/band_rejected", "0.125", "40") in rows
    assert ("eval/sums/reward_mean", "0.5", "40") in rows
    assert ("eval/sums/greedy_reward_mean", "0.625", "40") in rows


def test_a_long_run_is_drawn_as_small_as_a_short_one() -> None:
    page = chart_html(updates(20_000), [], "tiny-1")
    assert len(page) < 400_000
    assert "mean of 50 updates" in page


@pytest.mark.parametrize("numbers", [[], updates(1), [UpdateRow(1, 0, 1, 1, {"reward/mean": math.nan}, None, 0.0, 0)]])
def test_a_run_without_numbers_has_a_chart_too(numbers: list[UpdateRow]) -> None:
    assert "nothing yet" in chart_html(numbers, [], "tiny-1") or len(numbers[0].metrics) > 1
    assert chart_png(numbers, [], "tiny-1").startswith(b"\x89PNG")


def test_a_title_with_dollars_is_no_formula() -> None:
    assert chart_png(updates(2), [], "a$^{$b").startswith(b"\x89PNG")
