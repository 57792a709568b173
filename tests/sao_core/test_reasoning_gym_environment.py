import asyncio
import hashlib
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import psutil
import pytest

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.environments.reasoning_gym_data import EVALUATING, UNORDERED, DataSets
from sao_core.outside import Outside
from sao_core.trajectory import Role

pytest.importorskip("reasoning_gym")
SPEC = get("reasoning_gym")
SUM = {"dataset": "chain_sum", "config": {"max_terms": 3, "max_digits": 1}}


def all_names():
    factory = importlib.import_module("reasoning_gym.factory")
    return sorted(factory.DATASETS.keys() - {"composite"})


def source(seed=0, **options):
    parsed = SPEC.parse_options(options)
    return parsed, SPEC.tasks(parsed, seed)


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        source(**options)
    return str(caught.value)


def judge(options, task, reply):
    async def episode():
        environment = SPEC.make(options, Outside())
        opening = await environment.reset(task)
        result = await environment.step(reply)
        await environment.close()
        return opening, result

    return asyncio.run(episode())


def question(task):
    return task.data["entry"]["question"]


def test_a_right_answer_in_tags_is_worth_one_and_a_wrong_one_nothing():
    options, tasks = source(**SUM)
    task = tasks.task("train/0")
    expression = re.search(r"problem: (.+) =", question(task)).group(1)
    result = sum(Fraction(term) for term in expression.replace("- ", "-").replace("+ ", "").split())
    opening, right = judge(options, task, f"Let me see: 99\n<answer> {result} </answer>")
    assert [message.role for message in opening] == [Role.USER]
    assert opening[0].content.endswith("=\n\nWrite only the final answer between <answer> and </answer>.")
    assert (right.reward, right.terminated, right.observation) == (1.0, True, ())
    assert right.info["reward_parts"] == {"score": 1.0, "correct": 1.0, "tagged": 1.0}
    _, wrong = judge(options, task, f"<answer>{result + 1}</answer>")
    assert (wrong.reward, wrong.terminated) == (0.0, True)


@pytest.mark.parametrize(
    ("reply", "extract", "judged"),
    [
        ("<answer>7</answer>", "nothing", "7"),
        ("<answer>6</answer> no: <answer>\n7\n</answer> yes", "last_line", "7"),
        ("I add.\n7\n", "last_line", "7"),
        ("I add.\n7\n", "reply", "I add.\n7"),
        ("I add.\n7\n", "nothing", ""),
        ("", "last_line", ""),
    ],
)
def test_the_answer_is_found_in_tags_or_where_the_option_says(reply, extract, judged):
    options, tasks = source(**SUM, extract=extract)
    asked = []
    task = tasks.task("train/0")
    task.data["score"] = lambda answer: asked.append(answer) or 0.5
    _, result = judge(options, task, reply)
    assert asked == ([judged] if judged else [])
    assert result.reward == (0.5 if judged else 0.0)
    assert result.info["reward_parts"]["tagged"] == float("<answer>" in reply)


def test_a_score_in_part_is_the_reward_unless_only_the_right_answer_counts():
    options, tasks = source(**SUM)
    task = tasks.task("train/0")
    reply = f"<answer>it is {task.data['entry']['answer']}</answer>"
    _, in_part = judge(options, task, reply)
    assert 0 < in_part.reward < 1
    strict, _ = source(**SUM, correct_at=1.0)
    _, nothing = judge(strict, task, reply)
    assert (nothing.reward, nothing.info["reward_parts"]["score"]) == (0.0, in_part.reward)
    _, all_of_it = judge(strict, task, f"<answer>{task.data['entry']['answer']}</answer>")
    assert all_of_it.reward == 1.0


def test_a_system_message_and_instructions_are_as_asked():
    options, tasks = source(**SUM, system="You add.", instructions="")
    opening, _ = judge(options, tasks.task("train/0"), "1")
    assert [(m.role, m.content) for m in opening] == [
        (Role.SYSTEM, "You add."),
        (Role.USER, question(tasks.task("train/0"))),
    ]


def test_questions_are_held_out_by_what_they_ask():
    """Two terms of one digit make 200 different sums, so that separate random numbers alone would share most."""
    narrow = {"dataset": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}}
    _, tasks = source(**narrow)
    training = {question(tasks.task(tasks.key_at(position))) for position in range(400)}
    evaluation = {question(tasks.task(key)) for key in tasks.evaluation_keys(100)}
    assert len(training) > 100
    assert len(evaluation) > 20
    assert not training & evaluation
    _, by_index = source(**narrow, held_out_by="index")
    assert {question(by_index.task(key)) for key in by_index.evaluation_keys(100)} & {
        question(by_index.task(by_index.key_at(position))) for position in range(400)
    }


def test_a_data_set_with_one_question_cannot_be_held_out_by_what_it_asks():
    one = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    _, tasks = source(**one)
    tasks._data.entry = lambda number, entry=tasks._data.entry: entry(0)
    with pytest.raises(
        ConfigError, match=r"too few different questions .* set environment.options.held_out_by to index"
    ):
        [tasks.task(key) for key in ("train/3", "evaluation/0")]


def test_a_fixed_number_of_questions_comes_back_in_another_order():
    _, tasks = source(**SUM, size=5)
    epochs = [[tasks.key_at(position) for position in range(start, start + 5)] for start in (0, 5, 10)]
    assert all(sorted(epoch) == [f"train/{n}" for n in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert tasks.epoch_size == 5
    _, endless = source(**SUM)
    assert [endless.key_at(position) for position in (0, 7)] == ["train/0", "train/7"]


def test_other_seeds_ask_other_questions_and_unknown_keys_are_refused():
    _, first = source(seed=0, **SUM)
    _, second = source(seed=1, **SUM)
    assert [question(first.task(f"train/{n}")) for n in range(5)] != [
        question(second.task(f"train/{n}")) for n in range(5)
    ]
    for key in ("test/0", "train/", "train/x", "train"):
        with pytest.raises(KeyError):
            first.task(key)


def test_a_mixture_draws_by_weight_and_reports_by_data_set():
    options, tasks = source(dataset={"chain_sum": 3, "spell_backward": 1}, config={"chain_sum": {"max_terms": 2}})
    drawn = [tasks.task(tasks.key_at(position)) for position in range(200)]
    names = [task.difficulty for task in drawn]
    assert 0.65 < names.count("chain_sum") / 200 < 0.85
    assert set(names) == {"chain_sum", "spell_backward"}
    for task in drawn[:10]:
        _, result = judge(options, task, f"<answer>{task.data['entry']['answer']}</answer>")
        assert result.reward == 1.0
    _, equal = source(dataset=["gcd", "lcm"])
    assert {equal.task(f"train/{n}").difficulty for n in range(20)} == {"gcd", "lcm"}


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"dataset": "chain_sum", "config": {"max_terms": 4}}, {"2", "3", "4"}),
        ({"dataset": "chain_sum", "config": {"max_terms": 4}, "difficulty": "num_digits"}, {"1", "2", "3", "4"}),
        ({"dataset": "gsm_symbolic"}, {"1"}),
        ({"dataset": "count_primes"}, {""}),
    ],
    ids=["a graded parameter", "as the option says", "a number for all", "too many values to report by"],
)
def test_difficulty_is_what_the_entry_tells(options, labels):
    _, tasks = source(**options)
    assert {tasks.task(f"train/{n}").difficulty for n in range(40)} == labels


def test_demonstrations_answer_in_the_form_that_is_asked_for():
    options, _ = source(**SUM)
    shown = list(SPEC.demonstrations(options, 0, 5))
    _, tasks = source(**SUM)
    assert len(shown) == 5
    for index, messages in enumerate(shown):
        assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT]
        _, result = judge(options, tasks.task(f"demonstration/{index}"), messages[-1].content)
        assert result.info["reward_parts"] == {"score": 1.0, "correct": 1.0, "tagged": 1.0}


def test_of_many_right_answers_the_example_is_shown():
    options, tasks = source(dataset="graph_color")
    (messages,) = SPEC.demonstrations(options, 0, 1)
    _, result = judge(options, tasks.task("demonstration/0"), messages[-1].content)
    assert result.reward == 1.0


def test_a_data_set_without_answers_has_nothing_to_imitate():
    options, _ = source(dataset="rush_hour")
    with pytest.raises(ConfigError, match="`rush_hour` comes without answers"):
        list(SPEC.demonstrations(options, 0, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "unknown environment.options.dataset `chain_sums`; did you mean `chain_sum`?"),
        ({"dataset": "composite"}, "unknown environment.options.dataset `composite`"),
        (
            {"dataset": "chain_sum", "config": {"max_term": 3}},
            "`chain_sum` has no parameter `max_term`; did you mean `max_terms`?",
        ),
        ({"dataset": "chain_sum", "config": {"seed": 3}}, "`chain_sum` has no parameter `seed`"),
        ({"dataset": "chain_sum", "config": {"max_terms": 1}}, "max_terms must be >= min_terms: got {'max_terms': 1}"),
        ({"dataset": "chain_sum", "config": {"max_terms": "few"}}, "got {'max_terms': 'few'}"),
        ({"dataset": ["gcd"], "config": {"max_value": 3}}, "by the name of a data set: got `max_value`"),
        ({"dataset": ["gcd"], "config": {"gcd": 3}}, "of `gcd` must be a mapping: got 3"),
        ({"dataset": []}, "must be a name, a list of names or a mapping of names to weights above 0: got []"),
        ({"dataset": {"gcd": 0}}, "weights above 0: got {'gcd': 0}"),
        ({"dataset": "gcd", "extract": "tag"}, "extract must be 'last_line', 'reply' or 'nothing': got 'tag'"),
    ],
)
def test_settings_that_cannot_work_are_named_in_one_line(options, message):
    said = refusal(**options)
    assert message in said
    assert "\n" not in said


def test_a_difficulty_that_is_not_in_the_metadata_is_named():
    _, tasks = source(dataset="chain_sum", difficulty="terms")
    with pytest.raises(ConfigError, match=r"got `terms`; there are: .*num_terms"):
        tasks.task("train/0")


def test_a_missing_package_says_which_extra_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert refusal(dataset="chain_sum") == (
        "environment.name `reasoning_gym` needs a package that is not installed: "
        "pip install 'sao-pipeline[reasoning-gym]'"
    )


def test_the_version_names_the_package():
    environment = SPEC.make(source(**SUM)[0], Outside())
    assert environment.version == f"1+{importlib.metadata.version('reasoning-gym')}"


def test_a_worker_goes_on_only_with_the_same_question():
    options, tasks = source(**SUM)

    async def episode():
        begun, restored, other = (SPEC.make(options, Outside()) for _ in range(3))
        await begun.reset(tasks.task("train/0"))
        await restored.restore(tasks.task("train/0"), begun.state())
        with pytest.raises(ValueError, match="another question"):
            await other.restore(tasks.task("train/1"), begun.state())
        return await restored.step(f"<answer>{tasks.task('train/0').data['entry']['answer']}</answer>")

    assert asyncio.run(episode()).reward == 1.0


@pytest.mark.parametrize("answer", ["[[1,2],[3]]", "-1", "{}", "é", "null", "1e400", "nan", "inf + nan", "9" * 5000])
@pytest.mark.parametrize("name", ["boxnet", "coin_flip", "prime_factorization", "complex_arithmetic"])
def test_nonsense_is_a_wrong_answer_and_no_failure(name, answer):
    options, tasks = source(dataset=name)
    _, result = judge(options, tasks.task("train/0"), f"<answer>{answer}</answer>")
    assert 0 <= result.reward <= 0.05
    assert result.terminated


def test_a_data_set_whose_scorer_takes_anything_is_judged_by_comparison():
    options, tasks = source(dataset="game_of_life_halting")
    right = tasks.task("train/0").data["entry"]["answer"]
    wrong = {"True": "False", "False": "True"}[right]
    rewards = [
        judge(options, tasks.task("train/0"), f"<answer>{x}</answer>")[1].reward
        for x in (right.lower(), wrong, "maybe")
    ]
    assert rewards == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", sorted(EVALUATING - {"intermediate_integration", "polynomial_multiplication"}))
def test_an_answer_is_never_run_as_code(name, tmp_path):
    options, tasks = source(dataset=name)
    task = tasks.task("train/0")
    trace = tmp_path / "ran"
    for code in (
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"[__import__('pathlib').Path({str(trace)!r}).touch()]",
        f"open({str(trace)!r}, 'w')",
        f" open({str(trace)!r}, 'w')",
        f"5! + open({str(trace)!r}, 'w')",
    ):
        _, result = judge(options, task, f"<answer>{code}</answer>")
        assert result.reward < 0.1
        assert not trace.exists(), code
    _, right = judge(options, task, f"<answer>{task.data['entry']['answer']}</answer>")
    assert right.reward == 1.0


def test_the_data_sets_that_evaluate_answers_are_known():
    """Whose module calls an evaluator, other than for what it wrote itself."""
    own = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"}
    factory = importlib.import_module("reasoning_gym.factory")
    calls = re.compile(r"(?<!def )\b(eval|exec|parse_expr|sympify)\(")
    modules = {name: sys.modules[factory.DATASETS[name][0].__module__] for name in all_names()}
    evaluating = {name for name, module in modules.items() if calls.search(inspect.getsource(module))}
    assert evaluating - own == EVALUATING


def digest(entries):
    made = [(entry.fields["question"], entry.fields["answer"]) for entry in entries]
    return hashlib.sha256(repr(made).encode()).hexdigest()


def digests(hash_seed, names):
    """By a process of its own, whose global generators are seeded at random."""
    program = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_reasoning_gym_environment import DataSets, digest\n"
        "for name in sys.argv[2:]:\n"
        "    data = DataSets(name, {}, 3)\n"
        "    print('\\ndigest', name, digest([data.entry(number) for number in (0, 1, 70)]))\n"
    )
    done = subprocess.run(
        ["env", f"PYTHONHASHSEED={hash_seed}", sys.executable, "-c", program, str(Path(__file__).parent), *names],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return [line.removeprefix("digest ") for line in done.stdout.splitlines() if line.startswith("digest ")]


def test_a_key_is_the_same_question_in_any_process_even_a_new_one():
    """`ransom_note` draws from sets, so a process with a fixed hash seed makes its entries; it is replaced if lost."""
    names = ["chain_sum", "ransom_note"]
    assert "ransom_note" in UNORDERED

    def own():
        return [f"{name} {digest([data[name].entry(number) for number in (0, 1, 70)])}" for name in names]

    data = {name: DataSets(name, {}, 3) for name in names}
    first = own()
    process = psutil.Process(data["ransom_note"]._ordered.pid)
    process.kill()
    psutil.wait_procs([process], timeout=5)
    assert own() == first == digests(1, names)
    second = data["ransom_note"]._ordered.pid
    assert second != process.pid
    data.clear()
    assert not psutil.pid_exists(second)


@pytest.mark.long
def test_a_key_is_the_same_question_in_any_process_in_all_data_sets():
    first, second = digests(1, all_names()), digests(2, all_names())
    assert len(first) == len(all_names())
    assert first == second


@pytest.mark.long
def test_every_data_set_asks_and_scores():
    for name in all_names():
        data = DataSets(name, {}, 0)
        entry = data.entry(1)
        assert entry.fields["question"]
        assert entry.score("no such answer") < 0.5, name
        if entry.fields["answer"] is not None:
            assert entry.score(entry.fields["answer"]) == 1.0, name
