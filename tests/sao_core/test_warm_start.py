import json

import numpy as np
import pytest
import torch

from sao_core.config import ConfigError, WarmStartConfig
from sao_core.models.logprobs import TokenScorer
from sao_core.models.policy import load_policy, load_tokenizer
from sao_core.models.tiny import build_tiny
from sao_core.rollout.renderer import Renderer
from sao_core.trajectory import Message, Role
from sao_core.warm_start import _backward, _lr_factor, _parts, read_conversations, warm_start

CONVERSATIONS = [
    (Message(Role.USER, question), Message(Role.ASSISTANT, f"answer: {answer}"))
    for question, answer in (("find 1", 4), ("find 2", 7), ("solve 3", 1), ("compute 4 plus 4", 9))
] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny(folder, seed=0)
    return folder


def train(folder, conversations=CONVERSATIONS, seed=0, on_step=None, **settings):
    model, renderer = load_policy(folder), Renderer(load_tokenizer(folder))
    config = WarmStartConfig(**{"epochs": 12, "batch_size": 4, "lr": 5e-3, **settings})
    return model, warm_start(model, renderer, conversations, config, seed, on_step)


def greedy_reply(model, folder, question):
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([Renderer(tokenizer).prompt_ids([Message(Role.USER, question)])])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


def test_the_policy_says_afterwards_what_was_demonstrated(folder):
    model, metrics = train(folder)
    assert not model.training
    assert greedy_reply(model, folder, "find 2") == "answer: 7<|end|>"
    assert greedy_reply(model, folder, "compute 4 plus 4") == "answer: 9<|end|>"
    assert metrics["warm_start/loss"] < 0.05
    assert metrics["warm_start/steps"] == 12 * 4
    assert metrics["warm_start/action_tokens"] == 16 * 3


def test_the_first_loss_is_the_mean_over_action_tokens_alone(folder):
    seen = []
    conversations = [CONVERSATIONS[0], CONVERSATIONS[3]]
    train(folder, conversations, epochs=1, batch_size=2, on_step=lambda *step: seen.append(step))
    model, renderer = load_policy(folder), Renderer(load_tokenizer(folder))
    losses = []
    for messages in conversations:
        ids, mask = renderer.conversation(messages)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
        losses += [-float(logprobs[t - 1, ids[t]]) for t in range(len(ids)) if mask[t]]
    assert seen[0][:2] == (1, 1)
    assert seen[0][2] == pytest.approx(np.mean(losses), abs=1e-5)


def test_steps_are_told_one_by_one_and_the_callback_may_stop_them(folder):
    class Enough(Exception):
        pass

    seen = []

    def stop_at_three(done, total, loss):
        seen.append((done, total))
        if done == 3:
            raise Enough

    with pytest.raises(Enough):
        train(folder, on_step=stop_at_three)
    assert seen == [(1, 48), (2, 48), (3, 48)]


def test_the_same_seed_gives_the_same_weights(folder):
    models = [train(folder, seed=seed, epochs=2)[0].state_dict() for seed in (1, 1, 2)]
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(models[0][name], models[1][name])
    assert not torch.equal(models[0][name], models[2][name])


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 8192])
def test_how_a_step_is_cut_changes_neither_loss_nor_gradient(folder, micro_batch_tokens):
    model, renderer = load_policy(folder), Renderer(load_tokenizer(folder))
    rows = [tuple(map(torch.tensor, renderer.conversation(messages))) for messages in CONVERSATIONS[:4]]
    scorer = TokenScorer(model, temperature=1.0, chunk_tokens=4096)
    loss = _backward(scorer, rows, micro_batch_tokens, model.device)
    gradient = model.model.layers[0].self_attn.v_proj.weight.grad.clone()
    model.zero_grad()
    expected = -sum(scorer(ids[None], mask[None])[0].sum() for ids, mask in rows) / sum(int(m.sum()) for _, m in rows)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    assert torch.allclose(gradient, model.model.layers[0].self_attn.v_proj.weight.grad, atol=1e-6)


def test_parts_keep_every_conversation_and_the_budget():
    rows = [(torch.zeros(length, dtype=torch.int64), torch.ones(length, dtype=torch.bool)) for length in (5, 30, 4, 9)]
    assert [[ids.shape[0] for ids, _ in part] for part in _parts(rows, 12)] == [[4, 5], [9], [30]]


def test_the_learning_rate_rises_and_falls():
    factors = [_lr_factor(step, 100) for step in range(101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(factors) == 1.0
    assert factors[52] == pytest.approx(0.5, abs=0.02)
    assert factors[100] == pytest.approx(0.0)


def test_no_conversation_is_refused(folder):
    with pytest.raises(ConfigError, match="warm start needs at least one conversation: got none"):
        train(folder, [])


def test_a_conversation_without_a_turn_to_learn_is_named(folder):
    with pytest.raises(ConfigError, match="conversation 2: a demonstration needs messages that end in an assistant"):
        train(folder, [CONVERSATIONS[0], (Message(Role.USER, "find 1"),)])


def written(tmp_path, *rows):
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


TALK = {"messages": [{"role": "user", "content": "hi\u2028there"}, {"role": "assistant", "content": "ho"}]}


def test_conversations_are_read_from_json_lines(tmp_path):
    path = written(tmp_path, json.dumps(TALK, ensure_ascii=False), "", TALK, TALK)
    expected = (Message(Role.USER, "hi\u2028there"), Message(Role.ASSISTANT, "ho"))
    assert read_conversations(path) == [expected] * 3
    assert read_conversations(path, limit=2) == [expected] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK["messages"][:1]}, "talks.jsonl:2: `messages` needs an assistant turn to learn from"),
        ({"prompt": "hi"}, "talks.jsonl:2: `messages` must be a list of at least one message: got None"),
        ("{", "talks.jsonl:2: not valid JSON"),
        ({"messages": ["hi"]}, "talks.jsonl:2: message 1 must be an object with a text `content`: got 'hi'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, message):
    with pytest.raises(ConfigError) as caught:
        read_conversations(written(tmp_path, TALK, row))
    assert message in str(caught.value)


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no conversation"):
        read_conversations(written(tmp_path))
    with pytest.raises(ConfigError, match=r"warm_start\.path cannot be read"):
        read_conversations(tmp_path / "nowhere.jsonl")


def test_a_conversation_in_openais_shape_keeps_its_calls_and_tools(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    messages = [
        {"role": "user", "content": "find 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "look"},
        {"role": "assistant", "content": "answer: 3"},
    ]
    (read,) = read_conversations(written(tmp_path, {"messages": messages, "tools": [tool]}))
    assert [message.extra for message in read] == [
        {"tools": [tool]},
        {"tool_calls": [call]},
        {"tool_call_id": "c1", "name": "look"},
        {},
    ]
    assert read[1].content == ""
    for bad, message in (
        ({"messages": messages, "tools": ["look"]}, "talks.jsonl:1: `tools` must be a list of function schemas"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "talks.jsonl:1: message 1: `tool_calls`"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_conversations(written(tmp_path, bad))
