"""Several environments in one run: shares, whose task it is, whose rules hold."""

import asyncio
import json
from collections import Counter

import pytest
from learner_fixtures import make_trajectory

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.environments.calculator import Calculator
from sao_core.environments.jsonl import Jsonl
from sao_core.outside import Outside
from sao_core.step_metrics import rollout_metrics
from sao_core.trajectory import Role

SPEC = get("mixture")


def mixed(tmp_path, seed=0, **weights):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"double {n}", "answer": 2 * n}) for n in range(20)))
    parts = {
        "sums": {"environment": "calculator", "weight": weights.get("sums", 3)},
        "jsonl": {"weight": weights.get("jsonl", 1), "options": {"path": str(path)}},
    }
    options = SPEC.parse_options({"parts": parts})
    return options, SPEC.tasks(options, seed)


def test_each_part_has_its_share_of_every_hundred_prompts(tmp_path):
    _, tasks = mixed(tmp_path)
    keys = [tasks.key_at(position) for position in range(300)]
    for start in (0, 100, 200):
        assert Counter(key.partition("/")[0] for key in keys[start : start + 100]) == {"sums": 75, "jsonl": 25}
    own = [key.partition("/")[2] for key in keys if key.startswith("sums/")]
    assert own == [f"train/{n}" for n in range(225)], "each part is walked in its own order, without gaps"
    assert [tasks.key_at(position) for position in (250, 3, 120)] == [keys[250], keys[3], keys[120]]
    assert keys != [mixed(tmp_path, seed=1)[1].key_at(position) for position in range(300)]


def test_a_task_is_made_and_judged_by_its_own_environment(tmp_path):
    options, tasks = mixed(tmp_path)
    for prefix, kind in (("sums/", Calculator), ("jsonl/", Jsonl)):
        key = next(key for key in map(tasks.key_at, range(100)) if key.startswith(prefix))
        task = tasks.task(key)
        assert (task.key, task.environment) == (key, prefix[:-1])
        episode = SPEC.episode(options, task, Outside())
        assert type(episode) is kind
        assert asyncio.run(episode.reset(task))[-1].role is Role.USER


def test_every_part_is_evaluated_on_what_it_holds_out(tmp_path):
    _, tasks = mixed(tmp_path, jsonl=0.01)
    keys = tasks.evaluation_keys(12)
    assert Counter(key.partition("/")[0] for key in keys) == {"sums": 11, "jsonl": 1}
    assert not set(keys) & {tasks.key_at(position) for position in range(2000)}


def test_demonstrations_come_from_the_parts_that_have_a_demonstrator(tmp_path):
    options, _ = mixed(tmp_path)
    told = list(SPEC.demonstrations(options, 0, 20))
    assert len(told) == 20
    assert all(conversation[-1].content.startswith("answer: ") for conversation in told)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"calculator": {}}, "must name at least two environments: got ['calculator']"),
        ({"calculator": {}, "calculater": {}}, "environment.options.parts.calculater: unknown environment.name"),
        ({"calculator": {}, "mixture": {}}, "must not hold a mixture"),
        ({"calculator": {"weight": 0}, "b": {}}, "parts.calculator.weight must be greater than 0: got 0"),
        (
            {"calculator": {"options": {"max_operand_": 5}}, "b": {"environment": "calculator"}},
            "environment.options.parts.calculator: environment.options of `calculator`: unknown setting `max_operand_`",
        ),
    ],
    ids=["one", "unknown", "nested", "weight", "option"],
)
def test_a_mixture_that_cannot_be_made_is_refused(parts, message):
    with pytest.raises(ConfigError) as caught:
        SPEC.tasks(SPEC.parse_options({"parts": parts}), 0)
    assert message in str(caught.value)


def test_rewards_are_reported_for_each_environment_of_a_batch():
    rollouts = [
        (make_trajectory(number, [5, 6], [False, True], score, environment=name),)
        for number, (name, score) in enumerate([("sums", 1.0), ("sums", 0.0), ("jsonl", 1.0)])
    ]
    metrics = rollout_metrics(rollouts, {})
    assert metrics["reward/mean/sums"] == 0.5
    assert metrics["reward/mean/jsonl"] == 1.0
    assert not any(name.startswith("reward/mean/") for name in rollout_metrics(rollouts[:2], {}))
