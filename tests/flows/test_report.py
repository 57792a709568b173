"""What the Prefect UI shows of a run: tables and a report that hostile text cannot leave."""

from __future__ import annotations

import html
import re

import pytest

from flows.run_page import evaluation_table
from infra.ledger import EvaluationRecord
from tasks.report import MOST_EVALUATIONS, evaluations_markdown, fenced, plain

HOSTILE = (
    "```\n<script>alert(1)</script>\n```",
    "~~~\n# heading",
    "`````\n[x](javascript:alert(1))",
    "| a | b |\n<img src=x onerror=alert(1)>",
)


def evaluation(step: int, **metrics: float) -> EvaluationRecord:
    values = {f"eval/calculator/{name.replace('__', '/')}": value for name, value in metrics.items()}
    return EvaluationRecord(step + 1, step, step, "calculator", values, "sha", 0.0)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_in_a_code_block_cannot_leave_it(text: str):
    first, *body, last = fenced(text).split("\n")
    fence = first.removesuffix("text")
    assert set(fence) == {"`"}
    assert last == fence
    assert "\n".join(body) == text
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    assert len(fence) > longest


def test_evaluations_stand_side_by_side():
    table = evaluations_markdown([evaluation(0, reward_mean=0.25), evaluation(9, reward_mean=0.5, pass_at_2=0.75)])
    assert "| metric | step 0 | step 9 |" in table
    assert "| eval/calculator/reward_mean | 0.250 | 0.500 |" in table
    assert "| eval/calculator/pass_at_2 | – | 0.750 |" in table


def test_of_many_evaluations_the_first_and_the_newest_are_shown():
    head = evaluations_markdown([evaluation(step, reward_mean=0.5) for step in range(20)]).split("\n")[0]
    assert head == "| metric | step 0 | step 15 | step 16 | step 17 | step 18 | step 19 |"
    assert head.count("step") == MOST_EVALUATIONS


def test_a_hostile_difficulty_is_text_in_the_table_of_evaluations():
    hostile = "difficulty_<img src=x onerror=alert(1)>|[x](javascript:alert(1))`\n# _2_/reward_mean"
    *_, row = evaluations_markdown([evaluation(0, **{hostile: 0.5})]).split("\n")
    assert row.endswith(" | 0.500 |")
    assert not set("<>[]()`#\n*\\") & set(row.replace("&#", ""))
    assert row.count("|") == 3
    assert html.unescape(plain(hostile)) == hostile


def test_the_evaluation_table_has_a_row_for_each_difficulty():
    last = {"reward_mean": 1.0, "greedy_reward_mean": 0.5, "difficulty_2__reward_mean": 0.125}
    table = evaluation_table([evaluation(0, reward_mean=0.25), evaluation(9, **last)])
    assert table[0] == {
        "prompts": "all",
        "sampled, step 0": 0.25,
        "sampled, step 9": 1.0,
        "greedy, step 0": None,
        "greedy, step 9": 0.5,
    }
    assert table[1]["prompts"] == "difficulty 2"
    assert table[1]["sampled, step 9"] == 0.125


def test_a_single_evaluation_is_shown_once():
    table = evaluation_table([evaluation(3, reward_mean=0.25)])
    assert table == [{"prompts": "all", "sampled, step 3": 0.25, "greedy, step 3": None}]
