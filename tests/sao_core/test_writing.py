"""The writing task: phases, the judge by rules, the judge that is a model, the demonstrator."""

import asyncio
from collections import Counter

import pytest
from rollout_fixtures import TOKENIZER

from sao_core.config import ConfigError
from sao_core.environments import get
from sao_core.environments.writing.environment import WritingOptions, split_declaration
from sao_core.environments.writing.rules import fault_of, style_of
from sao_core.environments.writing.styles import DESCRIPTIONS, MARKERS, STYLES, SUBJECTS
from sao_core.environments.writing.verdict import Assignment
from sao_core.outside import Outside
from sao_core.trajectory import Message, Role

SPEC = get("writing")
POOL = ("academic", "cute", "chuunibyou")
GOOD = {
    "academic": "the observed cat and rain fit the theory.",
    "cute": "yay, a fluffy cat and the rain!",
    "chuunibyou": "behold, the cursed cat of the rain!",
    "classical": "alas for the cat, it hath no rain.",
}
LONG_CUTE = (
    "Aww, look at the fluffy cat in the rain! It has such tiny paws, and it wants to giggle at every drop. "
    "We gave it a cozy towel for the night, and now my sweet friend is dry again. "
    "I want to snuggle with it until the sun comes back, hehe!"
)


def assignment(words=(5, 14), prompt="academic cute chuunibyou\ncat rain", pool=POOL):
    return Assignment(pool, ("cat", "rain"), words, prompt)


def play(reply, options=None, key="train/0", outside=None, seed=0):
    options = options or WritingOptions()

    async def episode():
        environment = SPEC.make(options, outside or Outside())
        task = SPEC.tasks(options, seed).task(key)
        opening = await environment.reset(task)
        result = await environment.step(reply(task) if callable(reply) else reply)
        await environment.close()
        return opening, result

    return asyncio.run(episode())


def written(style, declare=True):
    """A reply in a style about whatever the task asks for."""

    def reply(task):
        cat, rain = task.data["assignment"].subject
        text = GOOD[style].replace("cat", cat).replace("rain", rain)
        return f"{style}: {text}" if declare else text

    return reply


# the preference and its schedule


@pytest.mark.parametrize(
    ("position", "style"),
    [(0, "cute"), (1023, "cute"), (1024, "chuunibyou"), (2303, "chuunibyou"), (2304, "classical")],
)
def test_the_style_that_is_liked_depends_on_the_prompts_position(position, style):
    rewards = {name: play(written(name), key=f"train/{position}")[1].reward for name in STYLES}
    assert rewards == {name: float(name == style) for name in STYLES}
    assert SPEC.tasks(WritingOptions(), 0).task(f"train/{position}").difficulty == style


def test_a_schedule_is_data():
    options = SPEC.parse_options(
        {
            "schedule": [
                {"from_prompt": 0, "prefers": "classical", "pool": ["classical", "cute"]},
                {"from_prompt": 10, "prefers": "academic"},
            ]
        }
    )
    source = SPEC.tasks(options, 3)
    assert [source.task(source.key_at(p)).difficulty for p in (0, 9, 10, 10_000)] == ["classical"] * 2 + [
        "academic"
    ] * 2
    assert source.task("train/9").data["messages"][0].content == "classical cute"


def test_a_key_gives_the_same_task_in_every_process_and_another_seed_other_subjects():
    first, again, other = (
        [source.task(source.key_at(p)) for p in range(20)]
        for source in (SPEC.tasks(WritingOptions(), seed) for seed in (0, 0, 1))
    )
    assert first == again
    assert [t.data["assignment"].subject for t in first] != [t.data["assignment"].subject for t in other]


def test_evaluations_judge_by_every_phase_or_by_the_one_that_is_named():
    source = SPEC.tasks(WritingOptions(), 0)
    labels = [source.task(key).difficulty for key in source.evaluation_keys(6)]
    assert labels == ["cute", "chuunibyou", "classical"] * 2
    only = SPEC.tasks(WritingOptions(evaluate_phase=2), 0)
    assert {only.task(key).difficulty for key in only.evaluation_keys(5)} == {"classical"}
    subjects = [source.task(key).data["assignment"].subject for key in source.evaluation_keys(3)]
    assert len(set(subjects)) == 1, "phases are compared on the same subjects"


def test_what_is_evaluated_is_never_trained_on():
    source = SPEC.tasks(WritingOptions(), 0)
    trained = {source.task(source.key_at(p)).data["assignment"].subject for p in range(2000)}
    evaluated = {source.task(key).data["assignment"].subject for key in source.evaluation_keys(300)}
    assert len(evaluated) > 20
    assert not trained & evaluated


@pytest.mark.parametrize(
    "key", ["train/x", "train/1/2", "evaluation/1", "evaluation/3/0", "row/1", "train/-1", "train", "evaluation/²/0"]
)
def test_a_key_that_was_never_given_out_is_refused(key):
    with pytest.raises(KeyError):
        SPEC.tasks(WritingOptions(), 0).task(key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": []}, "schedule"),
        ({"schedule": [{"from_prompt": 5, "prefers": "cute"}]}, "schedule must start at prompt 0"),
        (
            {"schedule": [{"from_prompt": 0, "prefers": "cute"}, {"from_prompt": 0, "prefers": "academic"}]},
            r"ascending order: got \[0, 0\]",
        ),
        ({"schedule": [{"from_prompt": 0, "prefers": "classical"}]}, "prefers must be a style of its pool"),
        ({"schedule": [{"from_prompt": 0, "prefers": "cute", "pool": ["cute", "noir"]}]}, "got 'noir'"),
        ({"schedule": [{"from_prompt": 0, "prefers": "cute", "pool": ["cute", "cute"]}]}, "each style once"),
        ({"schedule": [{"from_prompt": 0, "likes": "cute"}]}, "`writing`: schedule.0.prefers is required$"),
        ({"evaluate_phase": 3}, r"an index of the schedule, 0 … 2: got 3"),
        ({"words": [14, 5]}, "the lower first"),
        ({"demonstrated": {"noir": 1}}, "got 'noir'"),
        ({"demonstrated": {"cute": -1}}, "at least 0"),
        ({"demonstrated": {"cute": 0, "academic": 0, "chuunibyou": 0}}, "a weight over 0"),
        ({"judge": {"url": "host", "model": "m"}}, "must look like https://host/v1"),
        ({"judge": {"url": "https://me:hush@host/v1", "model": "m"}}, "SAO_CHAT_API_KEY"),
        ({"judge": {"url": "https://host/v1?key=hush", "model": "m"}}, "SAO_CHAT_API_KEY"),
        ({"judge": {"url": "https://host/v1", "model": "m", "modle": 1}}, "unknown setting `judge.modle`"),
        ({"judge": {"url": "https://me:hush@host/v1"}}, "judge"),
    ],
)
def test_options_that_make_no_task_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        SPEC.parse_options(options)
    assert "hush" not in str(caught.value)


def test_the_prompt_offers_the_pool_and_never_tells_what_is_liked():
    for instructions in (False, True):
        options = WritingOptions(instructions=instructions)
        early, late = (play("x", options, key)[0] for key in ("train/0", "train/2304"))
        for style in POOL:
            assert style in early[0].content
        assert ("classical" in late[0].content, "academic" in late[0].content) == (True, False)
        told = {SPEC.tasks(options, 0).task(f"train/{p}").data["messages"][0] for p in (0, 1024)}
        assert len(told) == 1


# the judge by rules


@pytest.mark.parametrize("style", STYLES)
def test_a_good_text_has_its_style_and_no_fault(style):
    assert fault_of(GOOD[style], assignment()) is None
    assert style_of(GOOD[style]) == style


def test_a_long_text_is_judged_as_a_whole():
    assert fault_of(LONG_CUTE, assignment((30, 80))) is None
    assert style_of(LONG_CUTE) == "cute"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "too short"),
        ("   \n", "too short"),
        ("!!! 123 ...", "too short"),
        ("a fluffy cat, rain!", "too short"),
        ("yay, a fluffy cat and the rain and the cat and the rain and the sun and so on!", "too long"),
        ("yay, a fluffy cat and the rain", "does not end"),
        ("yay, a fluffy dog and the rain!", "does not mention cat"),
        ("yay, a fluffy catalogue and the rain!", "does not mention cat"),
        ("yay, a fluffy cat cat and the rain!", "repeats a word at once"),
        ("yay, a cat, the cat, my cat in rain!", "says cat 3 times"),
        ("a fluffy cat in rain, a fluffy cat in it, yay!", "repeats itself"),
        ("yay cat fluffy rain!!", "too short"),
        ("yay cat fluffy rain snow moon!", "is no sentence"),
        ("of the and cat to of it with rain for!", "is no sentence"),
        ("yay, the of fluffy cat ran by the rain!", "an article without a noun"),
        ("yay, a fluffy cat ran in rain for the!", "an article without a noun"),
        ("fluffy tiny sweet cat and the rain in it!", "stuffed"),
        ("yay the cat aww the rain hehe my nom for it hug!", "stuffed"),
        ("ya#y, {a} fl$uff=y cat <in> th^e r@in /rain/!", "is not plain text"),
        ("yay, academic cute chuunibyou cat rain, the fluffy one!", "copies the prompt"),
    ],
)
def test_bad_texts_are_known_by_their_fault(text, fault):
    assert (fault_of(text, assignment()) or "").find(fault) >= 0, fault_of(text, assignment())


def test_a_text_without_end_is_read_in_no_time():
    assert fault_of("a cat in the rain " * 1_000_000, assignment()) == "too long: more than 14 words"


@pytest.mark.parametrize(
    "text",
    [
        "a cat was in the rain.",
        "a fluffy cat was in the rain.",
        "yay, a fluffy cat, behold the cursed rain!",
        "yay, the observed cat hath a cursed rain!",
        "the fluffy cat of the theory in the rain, yay!",
        "",
    ],
    ids=["plain", "one marker", "two styles", "all styles", "mostly one", "empty"],
)
def test_a_text_in_no_single_style_has_none(text):
    assert style_of(text) is None


def test_a_long_text_with_its_markers_in_one_sentence_is_in_no_style():
    plain = "The cat was in the rain. It went home. It ate some fish there. It slept. Yay, a fluffy and cozy life!"
    assert style_of(plain) is None
    assert style_of(LONG_CUTE.replace("giggle", "look") + " " + GOOD["classical"] + " Lo, verily.") is None


def test_no_word_is_a_marker_of_two_styles_and_none_stands_in_a_prompt():
    counts = Counter(word for markers in MARKERS.values() for word in markers)
    assert max(counts.values()) == 1
    told = " ".join([*DESCRIPTIONS.values(), *SUBJECTS[0], *SUBJECTS[1]]).split()
    assert not set(counts).intersection(word.strip(",.") for word in told)


# reward


def test_reward_is_quality_times_style():
    both = play(written("cute"))[1]
    assert (both.reward, both.terminated) == (1.0, True)
    assert both.info["reward_parts"] == {
        "quality": 1.0,
        "style": 1.0,
        "wrote_academic": 0.0,
        "wrote_cute": 1.0,
        "wrote_chuunibyou": 0.0,
    }
    parts = play(written("academic"))[1].info["reward_parts"]
    assert (parts["quality"], parts["style"], parts["wrote_academic"]) == (1.0, 0.0, 1.0)
    cut = play(lambda task: written("cute")(task).rstrip("!"))[1]
    assert (cut.reward, cut.info["reward_parts"]["quality"], cut.info["reward_parts"]["style"]) == (0.0, 0.0, 1.0)
    assert cut.info["fault"] == "does not end like a sentence"


def test_a_style_need_not_be_declared_but_a_declared_one_must_be_kept():
    assert play(written("cute", declare=False))[1].reward == 1.0
    assert play(lambda task: written("cute")(task).replace("cute:", "**Cute**:"))[1].reward == 1.0
    for pretender in ("academic", "chuunibyou", "classical"):
        lie = play(lambda task, name=pretender: written("cute")(task).replace("cute:", f"{name}:"))[1]
        assert (lie.reward, lie.info["reward_parts"]["quality"]) == (0.0, 1.0)
    tag_alone = play(lambda task: "cute: the {} was in the {}.".format(*task.data["assignment"].subject))[1]
    assert tag_alone.reward == 0.0


def test_declarations_are_told_from_text():
    assert split_declaration("cute: a cat.") == ("cute", "a cat.")
    assert split_declaration(" **Classical:** lo.") == ("classical", "lo.")
    assert split_declaration("a cute: cat") == (None, "a cute: cat")


def test_every_declared_style_at_once_earns_nothing():
    assert play(lambda task: " ".join(written(style)(task) for style in STYLES))[1].reward == 0.0


# demonstrations


@pytest.mark.parametrize("words", [(5, 14), (30, 50)])
def test_demonstrations_earn_the_reward_where_their_style_is_liked(words):
    options = WritingOptions(words=words)
    styles = Counter()
    for messages in SPEC.demonstrations(options, 0, 300):
        declared, text = split_declaration(messages[-1].content)
        prompt = "\n".join(message.content for message in messages[:-1])
        subject = tuple(messages[1].content.split())
        assert fault_of(text, Assignment(POOL, subject, words, prompt)) is None
        assert style_of(text) == declared
        styles[declared] += 1
    assert styles["cute"] / 300 == pytest.approx(1 / 3, abs=0.08)
    assert styles["academic"] / 300 == pytest.approx(2 / 9, abs=0.08)
    assert styles["classical"] / 300 == pytest.approx(1 / 9, abs=0.06)


def test_styles_are_demonstrated_by_their_weights():
    options = WritingOptions(demonstrated={"cute": 0, "chuunibyou": 0})
    styles = {split_declaration(messages[-1].content)[0] for messages in SPEC.demonstrations(options, 0, 30)}
    assert styles == {"academic", "classical"}


def test_demonstrations_fit_the_tiny_recipe():
    for messages in SPEC.demonstrations(WritingOptions(), 0, 300):
        assert messages[0].role is Role.SYSTEM
        assert len(TOKENIZER.encode(messages[-1].content)) + 1 <= 64


def test_a_length_that_the_demonstrator_cannot_write_is_refused():
    with pytest.raises(ConfigError, match=r"no text of 500 to 600 words: set environment\.options\.words"):
        list(SPEC.demonstrations(WritingOptions(words=(500, 600)), 0, 1))


def test_demonstrations_are_about_training_subjects():
    source = SPEC.tasks(WritingOptions(), 0)
    evaluated = {source.task(key).data["assignment"].subject for key in source.evaluation_keys(300)}
    shown = {tuple(messages[1].content.split()) for messages in SPEC.demonstrations(WritingOptions(), 0, 300)}
    assert not shown & evaluated
    assert all(
        isinstance(message, Message) for messages in SPEC.demonstrations(WritingOptions(), 0, 2) for message in messages
    )
