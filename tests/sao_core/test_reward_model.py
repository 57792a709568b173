"""Reward by a sequence classifier whose score is known by construction."""

import asyncio
import json
import math
import threading

import pytest
from classifier_fixtures import expected_logit, share_classifier
from rollout_fixtures import END, TOKENIZER, ScriptedEngine, request, said, small_model

from sao_core.config import ConfigError, RolloutConfig
from sao_core.environments import get
from sao_core.environments.batched import Batched
from sao_core.environments.reward_model import RewardModelOptions, label_of, reward_of
from sao_core.models.classifier import Classifier
from sao_core.models.policy import save_policy
from sao_core.models.tiny import build_tokenizer
from sao_core.outside import Outside
from sao_core.rollout.agent import run_rollout
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Outcome, Role

SPEC = get("reward_model")
VOWELS = {TOKENIZER.convert_tokens_to_ids(letter) for letter in "aeiou"}
ASKED = Message(Role.USER, "tell of cat and rain")


def reply(text):
    return (ASKED, Message(Role.ASSISTANT, text))


def share(*texts):
    """Of vowels among the tokens of all texts, by counting letters: these texts are bytes to the tokenizer."""
    whole = "".join(texts)
    return sum(letter in "aeiou" for letter in whole) / len(whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return share_classifier(tmp_path_factory.mktemp("classifier") / "vowels", TOKENIZER, VOWELS)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    """The same without a chat template, with two labels."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    return share_classifier(tmp_path_factory.mktemp("classifier") / "plain", tokenizer, VOWELS, labels=2)


def play(folder, *actions, key="train/0", **options):
    options = SPEC.parse_options({"model": str(folder), "device": "cpu", **options})

    async def one(action):
        environment = SPEC.make(options, Outside())
        await environment.reset(SPEC.tasks(options, 0).task(key))
        return await environment.step(action)

    async def together():
        return await asyncio.gather(*(one(action) for action in actions))

    return asyncio.run(together())


# the classifier


def test_a_conversation_is_read_by_the_classifiers_own_template(folder):
    (logits,) = Classifier(str(folder), "cpu").logits([reply("aaxx")])
    rendered = TOKENIZER.apply_chat_template([m.as_dict() for m in reply("aaxx")], tokenize=False)
    ids = TOKENIZER.encode(rendered, add_special_tokens=False)
    vowels = sum(token in VOWELS for token in ids) / len(ids)
    assert logits == pytest.approx((expected_logit(vowels),), rel=1e-5)
    assert len(ids) < len(rendered), "special tokens are tokens, not text"


def test_without_a_template_prompt_and_reply_are_read_as_a_pair(plain_folder):
    (logits,) = Classifier(str(plain_folder), "cpu").logits([reply("aaxx")])
    logit = expected_logit(share(ASKED.content, "aaxx"))
    assert logits == pytest.approx((-logit / 2, logit / 2), rel=1e-5)


def test_the_reply_can_be_read_alone(folder):
    (logits,) = Classifier(str(folder), "cpu", reply_only=True).logits([reply("aaxx")])
    assert logits == pytest.approx((expected_logit(0.5),), rel=1e-5)


def test_an_empty_reply_read_alone_is_scored_and_fails_no_other(folder):
    classifier = Classifier(str(folder), "cpu", reply_only=True)
    (alone,) = classifier.logits([reply("")])
    assert alone == pytest.approx((expected_logit(0.0),), rel=1e-5)
    assert classifier.logits([reply("aaxx"), reply("")])[1] == pytest.approx(alone, rel=1e-5)


def test_a_batch_scores_like_its_members_alone(folder):
    classifier = Classifier(str(folder), "cpu")
    replies = [reply("a" * n + "x" * (7 - n) * n) for n in range(1, 7)]
    together = [logits[0] for logits in classifier.logits(replies)]
    assert together == pytest.approx([classifier.logits([one])[0][0] for one in replies], abs=1e-5)
    assert len({round(logit, 3) for logit in together}) == 6


def test_a_model_without_a_padding_token_scores_one_by_one(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    folder = share_classifier(tmp_path / "unpadded", tokenizer, VOWELS, pad=False)
    scores = Classifier(str(folder), "cpu", reply_only=True).logits([reply("aaxx"), reply("axxxxxxx")])
    assert [logits[0] for logits in scores] == pytest.approx([expected_logit(0.5), expected_logit(0.125)], rel=1e-5)


def test_what_is_too_long_loses_its_beginning(folder):
    (logits,) = Classifier(str(folder), "cpu", reply_only=True).logits([reply("x" * 600 + "a" * 512)])
    assert logits == pytest.approx((expected_logit(1.0),), rel=1e-5)


def test_a_policy_is_no_classifier(folder, tmp_path):
    save_policy(small_model(), TOKENIZER, tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"must be a model for sequence classification: .* holds Qwen3MoeForCausalLM"):
        SPEC.tasks(RewardModelOptions(model=str(tmp_path / "policy")), 0)
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    config["architectures"] = ["Qwen3MoeForSequenceClassification"]
    (tmp_path / "policy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks weights, first score\.weight"):
        Classifier(str(tmp_path / "policy"), "cpu")


def test_a_folder_that_lacks_something_is_refused_before_the_run(folder, tmp_path):
    for missing, message in (
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer_config.json", "has no tokenizer"),
    ):
        broken = tmp_path / missing
        broken.mkdir()
        for file in folder.iterdir():
            if file.name != missing:
                (broken / file.name).write_bytes(file.read_bytes())
        with pytest.raises(ConfigError, match=message):
            SPEC.tasks(RewardModelOptions(model=str(broken)), 0)
    with pytest.raises(ConfigError, match=r"is not a folder: 'org/name'; give a local one \(weights are never downl"):
        SPEC.tasks(RewardModelOptions(model="org/name"), 0)


# the reward


def options(**changes):
    return RewardModelOptions(model="x", **changes)


@pytest.mark.parametrize(
    ("logits", "settings", "reward"),
    [
        ((0.0,), {}, 0.5),
        ((math.log(3),), {}, 0.75),
        ((-1000.0,), {}, 0.0),
        ((1000.0,), {}, 1.0),
        ((0.0, math.log(3)), {}, 0.75),
        ((0.0, math.log(3)), {"label": 0}, 0.25),
        ((0.0, 0.0, math.log(2)), {"label": 2}, 0.5),
        ((-1000.0, 1000.0), {}, 1.0),
        ((2.5,), {"reward": "logit"}, 0.75),
        ((7.0,), {"reward": "logit"}, 1.0),
        ((-7.0,), {"reward": "logit"}, 0.0),
        ((9.0, 2.0), {"reward": "logit", "logit_range": (0, 8)}, 0.25),
    ],
)
def test_reward_of_logits(logits, settings, reward):
    assert reward_of(options(**settings), logits) == pytest.approx(reward, abs=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_and_no_reward(bad):
    with pytest.raises(ValueError, match="must be finite"):
        reward_of(options(), (0.0, bad))


def test_a_label_that_the_classifier_does_not_have_is_refused(folder):
    with pytest.raises(ConfigError, match=r"environment\.options\.label must name one of the classifier's 3 labels"):
        label_of(options(), 3)
    with pytest.raises(ConfigError, match=r"must be below the classifier's number of labels, 1: got 1"):
        SPEC.tasks(RewardModelOptions(model=str(folder), label=1), 0)


@pytest.mark.parametrize("wrong", [{"logit_range": (1, 1)}, {"logit_range": (0, float("inf"))}, {"label": -1}, {}])
def test_options_that_score_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"environment\.options of `reward_model`: "):
        SPEC.parse_options({"model": "x", **wrong} if wrong else {})


def test_the_reward_is_what_the_classifier_thinks_of_the_reply(folder):
    more, less = play(folder, "aaaa", "axxx", reads="reply")
    assert more.reward == pytest.approx(1 / (1 + math.exp(-expected_logit(1.0))), rel=1e-5)
    assert less.reward == pytest.approx(1 / (1 + math.exp(-expected_logit(0.25))), rel=1e-5)
    assert more.info["reward_parts"]["logit"] == pytest.approx(expected_logit(1.0), rel=1e-5)
    assert more.terminated


def test_two_labels_give_the_same_probability(plain_folder):
    (result,) = play(plain_folder, "aaaa", reads="reply")
    assert result.reward == pytest.approx(1 / (1 + math.exp(-expected_logit(1.0))), rel=1e-5)


def test_the_classifier_is_loaded_once_and_never_in_the_event_loops_thread(folder, monkeypatch):
    loaded = []

    class Counted(Classifier):
        def __init__(self, *arguments, **settings):
            loaded.append(threading.current_thread().name)
            super().__init__(*arguments, **settings)

    monkeypatch.setattr("sao_core.models.classifier.Classifier", Counted)
    results = play(folder, *(["axxx"] * 20), batch_size=3) + play(folder, "aaaa", batch_size=3)
    assert len(results) == 21
    assert len(loaded) == 1
    assert "batched" in loaded[0]


def test_a_rollout_is_scored_end_to_end(folder):
    parsed = RewardModelOptions(model=str(folder), device="cpu", reads="reply")
    source = SPEC.tasks(parsed, 0)
    (t,) = asyncio.run(
        run_rollout(
            request(),
            ScriptedEngine([said("aaxx")]),
            SPEC.make(parsed, Outside()),
            source.task(source.key_at(0)),
            Renderer(TOKENIZER),
            RolloutConfig(max_action_tokens=64, max_context_tokens=256),
            environment_name="reward_model",
            seed=0,
        )
    )
    assert t.outcome is Outcome.COMPLETED
    assert t.score == pytest.approx(1 / (1 + math.exp(-expected_logit(0.5))), rel=1e-5)
    assert (t.token_ids[-1], float(t.rewards[-1])) == (END, pytest.approx(t.score))


# batching


def test_questions_that_wait_together_are_answered_together():
    sizes = []
    release = threading.Event()

    def answer(asked):
        release.wait(5)
        sizes.append(len(asked))
        return [2 * value for value in asked]

    async def ask():
        batched = Batched(lambda: answer, 4)
        first = asyncio.ensure_future(batched(0))
        await asyncio.sleep(0.02)
        rest = [asyncio.ensure_future(batched(value)) for value in range(1, 7)]
        await asyncio.sleep(0.02)
        release.set()
        return await asyncio.gather(first, *rest)

    assert asyncio.run(ask()) == [0, 2, 4, 6, 8, 10, 12]
    assert sizes == [1, 4, 2]


def test_what_goes_wrong_is_told_to_everyone_who_asked_and_a_failed_start_is_tried_again():
    starts = []

    def start():
        starts.append(1)
        if len(starts) < 3:
            raise OSError("disk gone")
        return lambda asked: [1 / value for value in asked]

    async def ask():
        batched = Batched(start, 4)
        batched.begin()
        first = await asyncio.gather(batched(1), batched(2), return_exceptions=True)
        return first, await batched(2), await asyncio.gather(batched(0), return_exceptions=True)

    first, value, last = asyncio.run(ask())
    assert [str(error) for error in first] == ["disk gone"] * 2
    assert value == 0.5
    assert isinstance(last[0], ZeroDivisionError)


def test_too_few_answers_are_an_error_to_everyone_who_asked():
    async def ask():
        return await asyncio.wait_for(
            asyncio.gather(Batched(lambda: lambda asked: [], 4)(1), return_exceptions=True), 5
        )

    assert isinstance(asyncio.run(ask())[0], ValueError)


def test_one_that_gives_up_waiting_does_not_hold_up_the_others_nor_the_next_event_loop():
    batched = Batched(lambda: lambda asked: [value + 1 for value in asked], 4)

    async def give_up():
        waiting = asyncio.ensure_future(batched(1))
        await asyncio.sleep(0)
        waiting.cancel()
        return await batched(2)

    assert [asyncio.run(give_up()) for _ in range(2)] == [3, 3]


# prompts


def test_bundled_prompts_are_demonstrated_and_held_out(folder):
    parsed = RewardModelOptions(model=str(folder))
    source = SPEC.tasks(parsed, 0)
    evaluated = {source.task(key).data["subject"] for key in source.evaluation_keys(200)}
    trained = {source.task(source.key_at(position)).data["subject"] for position in range(500)}
    assert not trained & evaluated
    for messages in SPEC.demonstrations(parsed, 0, 50):
        assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT]
        assert len(TOKENIZER.encode(messages[1].content)) < 64
    with pytest.raises(KeyError):
        source.task("row/0")


def test_prompts_of_your_own_need_no_answer(folder, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"say {n}"}) for n in range(4)))
    parsed = RewardModelOptions(model=str(folder), path=str(rows))
    source = SPEC.tasks(parsed, 0)
    assert source.task(source.key_at(0)).data["messages"][0].content.startswith("say ")
    assert len(source.evaluation_keys(9)) == 1
    with pytest.raises(ConfigError, match=r"no demonstrator for prompts of your own: set warm_start\.path"):
        list(SPEC.demonstrations(parsed, 0, 1))
    rows.write_text('{"prompt": "a"}\n{"promt": "b"}')
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2: the row needs `messages` or a text `prompt`"):
        SPEC.tasks(parsed, 0)
