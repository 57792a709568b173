"""The Transformers engine against full forwards of the same weights."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_fixtures import full_forward, model_folder, small_model
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, MistralConfig

from sao_core.config import ConfigError
from sao_core.rollout.engine import EngineError, Sampled, StopReason
from sao_core.rollout.transformers_engine import SlotSession, TransformersEngine
from sao_core.trajectory import Sampling

PROMPT = [3, 5, 8, 13, 21]
PLAIN = Sampling()


def engine_of(model: Any, slots: int = 4, context: int = 64, **settings: Any) -> TransformersEngine:
    return TransformersEngine(model, 1, slots=slots, context=context, **settings)


def run(engine: TransformersEngine, work: Callable[[], Awaitable[Any]]) -> Any:
    """Let ``work`` use the engine while it steps."""

    async def both() -> Any:
        pump = asyncio.create_task(engine.run())
        try:
            return await work()
        finally:
            pump.cancel()
            await asyncio.wait([pump])

    return asyncio.run(asyncio.wait_for(both(), 60))


async def talk(
    engine: TransformersEngine,
    pieces: Sequence[Sequence[int]],
    lengths: Sequence[int],
    seed: int = 0,
    sampling: Sampling = PLAIN,
) -> tuple[np.ndarray, np.ndarray, list[Sampled]]:
    """A session of several turns → all its ids, the indices of the sampled ones, and the turns."""
    session = engine.open(sampling, seed)
    ids: list[int] = []
    actions: list[int] = []
    turns = []
    for piece, length in zip(pieces, lengths, strict=True):
        turn = await session.extend_and_sample(piece, {-2}, length)
        ids += piece
        actions += range(len(ids), len(ids) + len(turn.token_ids))
        ids += turn.token_ids.tolist()
        turns.append(turn)
    session.close()
    return np.array(ids), np.array(actions), turns


def recorded(turns: Sequence[Sampled]) -> np.ndarray:
    return np.concatenate([turn.logprobs for turn in turns])


@pytest.mark.parametrize("moe", [True, False], ids=["qwen3_moe", "llama"])
def test_logprobs_are_those_of_a_full_forward_over_turns_and_refilled_slots(moe: bool) -> None:
    model = small_model(moe=moe)
    engine = engine_of(small_model(moe=moe), slots=3)

    async def lane(first: int) -> list[Any]:
        done = []
        for seed in range(first, first + 4):
            pieces = [PROMPT[: 1 + seed % 5], [7] * (1 + seed % 3), [9, 11]]
            done.append(await talk(engine, pieces, [3 + seed % 4, 1, 6], seed, Sampling(temperature=0.7)))
        return done

    async def work() -> list[Any]:
        return [item for lane_ in await asyncio.gather(*(lane(10 * i) for i in range(3))) for item in lane_]

    for ids, actions, turns in run(engine, work):
        np.testing.assert_allclose(recorded(turns), full_forward(model, ids, 0.7)[actions], atol=1e-4)
    assert engine.stats.sampled_tokens == sum(3 + (10 * i + k) % 4 + 7 for i in range(3) for k in range(4))


def test_logprobs_after_swaps_are_those_of_the_version_that_sampled_each_token(tmp_path: Path) -> None:
    folders = {version: model_folder(tmp_path / str(version), seed=version) for version in (1, 2, 3)}
    models = {version: small_model(seed=version) for version in folders}
    engine = engine_of(small_model(seed=1), slots=4)

    async def work() -> list[Any]:
        async def publish() -> None:
            for version, steps in ((2, 6), (3, 15)):
                while engine.stats.steps < steps:
                    await asyncio.sleep(0)
                await engine.swap(folders[version], version)

        swapping = asyncio.create_task(publish())
        pieces = [PROMPT, [7, 7, 7]]
        talks = await asyncio.gather(*(talk(engine, pieces[: 1 + i % 2], [20, 12][: 1 + i % 2], i) for i in range(4)))
        await swapping
        return talks

    for ids, actions, turns in run(engine, work):
        versions = np.concatenate([turn.versions for turn in turns])
        assert set(versions) == {1, 2, 3}
        assert (np.diff(versions) >= 0).all()
        for version, model in models.items():
            ours = versions == version
            np.testing.assert_allclose(recorded(turns)[ours], full_forward(model, ids)[actions[ours]], atol=1e-4)
    assert engine.stats.swaps == 2


def test_keep_goes_on_with_the_keys_and_values_of_the_old_weights(tmp_path: Path) -> None:
    old, new = small_model(seed=1), small_model(seed=2)
    engine = engine_of(small_model(seed=1), on_swap="keep")

    async def work() -> tuple[np.ndarray, Sampled]:
        session = engine.open(PLAIN, 0)
        before = await session.extend_and_sample(PROMPT, {-2}, 4)
        await engine.swap(model_folder(tmp_path, seed=2), 2)
        return before.token_ids, await session.extend_and_sample([], {-2}, 1)

    said, after = run(engine, work)
    (token,), (logprob,) = after.token_ids, after.logprobs
    ids = torch.tensor([[*PROMPT, *said]])
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        old(input_ids=ids[:, :-1], cache=cache, use_cache=True)
        mixed = torch.log_softmax(new(input_ids=ids[:, -1:], cache=cache, use_cache=True).logits[0, -1], -1)
        recomputed = torch.log_softmax(new(input_ids=ids).logits[0, -1], -1)
    assert abs(mixed[token] - logprob) < 1e-4
    assert abs(recomputed[token] - logprob) > 0.1


def test_a_row_waiting_for_its_environment_is_recomputed_when_it_comes_back(tmp_path: Path) -> None:
    engine = engine_of(small_model(seed=1))

    async def work() -> tuple[list[int], Sampled]:
        session = engine.open(PLAIN, 0)
        before = await session.extend_and_sample(PROMPT, {-2}, 4)
        await engine.swap(model_folder(tmp_path, seed=2), 2)
        return [*PROMPT, *before.token_ids, 9], await session.extend_and_sample([9], {-2}, 3)

    context, turn = run(engine, work)
    expected = full_forward(small_model(seed=2), np.array([*context, *turn.token_ids]))[len(context) :]
    np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)
    assert turn.versions.tolist() == [2, 2, 2]


@pytest.mark.parametrize("limits", [{"step_tokens": 4}, {"mask_elements": 64 * 7}])
def test_long_prompts_go_through_in_several_steps_without_a_difference(limits: dict[str, int]) -> None:
    prompt = [(7 * i) % 50 + 1 for i in range(40)]
    whole, pieces = engine_of(small_model()), engine_of(small_model(), **limits)
    results = []
    for engine in (whole, pieces):

        async def work(engine: TransformersEngine = engine) -> Any:
            return await asyncio.gather(*(talk(engine, [prompt[i:]], [5], i) for i in range(4)))

        results.append(run(engine, work))
    for (ids, _, turns), (same_ids, _, same_turns) in zip(*results, strict=True):
        np.testing.assert_array_equal(ids, same_ids)
        np.testing.assert_allclose(recorded(turns), recorded(same_turns), atol=1e-5)
    assert pieces.stats.steps > whole.stats.steps


def test_a_rollouts_tokens_depend_on_its_seed_and_not_on_its_neighbours() -> None:
    async def alone(engine: TransformersEngine) -> np.ndarray:
        return (await talk(engine, [PROMPT, [9]], [12, 8], seed=5))[0]

    engine = engine_of(small_model())
    expected = run(engine, lambda: alone(engine))
    crowded = engine_of(small_model())

    async def crowd() -> np.ndarray:
        others = [asyncio.create_task(talk(crowded, [[2, 4]], [9 + i], seed=i)) for i in range(3)]
        await asyncio.sleep(0.01)
        result = await alone(crowded)
        await asyncio.gather(*others)
        return result

    np.testing.assert_array_equal(run(crowded, crowd), expected)
    engine = engine_of(small_model())
    other = run(engine, lambda: talk(engine, [PROMPT, [9]], [12, 8], seed=6))[0]
    assert (other != expected).any()


def test_draws_follow_the_policys_distribution() -> None:
    model = small_model(vocabulary=12)
    engine = engine_of(small_model(vocabulary=12), slots=64, context=8)

    async def work() -> list[int]:
        async def lane(first: int) -> list[int]:
            return [int((await talk(engine, [[3, 1, 2]], [1], first + 64 * k))[0][-1]) for k in range(40)]

        return [token for lane_ in await asyncio.gather(*map(lane, range(64))) for token in lane_]

    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[3, 1, 2]])).logits[0, -1].softmax(-1).numpy()
    frequency = np.bincount(run(engine, work), minlength=12) / (64 * 40)
    np.testing.assert_allclose(frequency, expected, atol=0.035)


def test_evaluation_may_draw_greedily_or_from_the_top_while_logprobs_stay_the_policys() -> None:
    model = small_model()
    engine = engine_of(small_model())
    samplings = [Sampling(greedy=True), Sampling(top_k=1), Sampling(top_p=1e-6), Sampling()]

    async def work() -> Any:
        return await asyncio.gather(*(talk(engine, [PROMPT], [10], 0, sampling) for sampling in samplings))

    results = run(engine, work)
    with torch.no_grad():
        ids = results[0][0]
        best = model(input_ids=torch.tensor(ids[None])).logits[0].argmax(-1).numpy()
    np.testing.assert_array_equal(ids[5:], best[4:-1])
    for other, _, turns in results[1:3]:
        np.testing.assert_array_equal(other, ids)
        np.testing.assert_allclose(recorded(turns), full_forward(model, ids)[5:], atol=1e-4)
    assert (results[3][0] != ids).any()


def test_a_turn_ends_at_a_stop_token_the_token_limit_the_context_or_the_deadline() -> None:
    engine = engine_of(small_model(), context=32)

    async def ask(stop: set[int], limit: int, deadline: float | None = None) -> Sampled:
        session = engine.open(PLAIN, 0)
        try:
            return await session.extend_and_sample(PROMPT, stop, limit, deadline)
        finally:
            session.close()

    async def work() -> None:
        free = await ask({-2}, 6)
        third = int(free.token_ids[2])
        stopped = await ask({third, -3}, 6)
        assert stopped.stop_reason is StopReason.STOP_TOKEN
        first = free.token_ids.tolist().index(third)
        np.testing.assert_array_equal(stopped.token_ids, free.token_ids[: first + 1])
        assert free.stop_reason is StopReason.MAX_NEW_TOKENS
        full = await ask({-2}, 999)
        assert (full.stop_reason, len(full.token_ids)) == (StopReason.CONTEXT_FULL, 32 - len(PROMPT))
        late = await ask({-2}, 999, time.monotonic() - 1)
        assert (late.stop_reason, len(late.token_ids)) == (StopReason.DEADLINE, 1)

    run(engine, work)


def test_what_cannot_be_sampled_is_refused() -> None:
    engine = engine_of(small_model(), slots=1, context=8)

    async def work() -> None:
        session = engine.open(PLAIN, 0)
        with pytest.raises(RuntimeError, match="all 1 slots are taken"):
            engine.open(PLAIN, 1)
        with pytest.raises(ValueError, match="8 tokens leave no room: 8 of 8 free"):
            await session.extend_and_sample([1] * 8, {-2}, 1)
        with pytest.raises(ValueError, match="room for a token: got 1 and 0"):
            await session.extend_and_sample([1], {-2}, 0)
        session.close()
        session.close()
        with pytest.raises(RuntimeError, match="closed"):
            await session.extend_and_sample([1], {-2}, 1)
        engine.open(PLAIN, 1)

    run(engine, work)


def test_a_cancelled_turn_frees_its_slot_and_leaves_the_others_alone() -> None:
    engine = engine_of(small_model(), slots=2)

    async def work() -> Any:
        endless = asyncio.create_task(talk(engine, [PROMPT], [50], 1))
        other = asyncio.create_task(talk(engine, [PROMPT], [20], 2))
        await asyncio.sleep(0.005)
        endless.cancel()
        return await other

    ids, actions, turns = run(engine, work)
    np.testing.assert_allclose(recorded(turns), full_forward(small_model(), ids)[actions], atol=1e-4)


def test_restart_begins_a_new_sequence_in_the_same_session() -> None:
    engine = engine_of(small_model())

    async def work() -> Sampled:
        session: SlotSession = engine.open(PLAIN, 0)
        await session.extend_and_sample([9] * 20, {-2}, 5)
        session.restart()
        assert session.room == 64
        return await session.extend_and_sample(PROMPT, {-2}, 5)

    turn = run(engine, work)
    np.testing.assert_allclose(
        turn.logprobs, full_forward(small_model(), np.array([*PROMPT, *turn.token_ids]))[5:], atol=1e-4
    )


def test_broken_weights_stop_the_engine_and_reach_whoever_waits() -> None:
    model = small_model()
    engine = engine_of(model)

    async def work() -> None:
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(EngineError, match="policy version 1 gives no finite log-probabilities"):
            await talk(engine, [PROMPT], [3])

    run(engine, work)


@pytest.mark.parametrize("slow", [True, False])
def test_few_busy_rows_among_many_idle_ones_give_the_same_numbers(slow: bool) -> None:
    """Decoding rows are either attended in place or copied together, by how sparse they are."""
    engine = engine_of(small_model(), slots=12)

    async def work() -> Any:
        idle = [engine.open(PLAIN, 99) for _ in range(9 if slow else 2)]
        talks = await asyncio.gather(*(talk(engine, [PROMPT, [4]], [5, 6], i) for i in range(3)))
        for session in idle:
            session.close()
        return talks

    for ids, actions, turns in run(engine, work):
        np.testing.assert_allclose(recorded(turns), full_forward(small_model(), ids)[actions], atol=1e-4)


def test_models_without_plain_full_attention_are_refused() -> None:
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    windowed = AutoModelForCausalLM.from_config(MistralConfig(**shape, sliding_window=16))
    with pytest.raises(ConfigError, match="sliding window is 16"):
        engine_of(windowed, context=64)
    engine_of(AutoModelForCausalLM.from_config(MistralConfig(**shape, sliding_window=16)), context=16)
    with pytest.raises(ConfigError, match="softcap"):
        engine_of(AutoModelForCausalLM.from_config(Gemma2Config(**shape, sliding_window=64)), context=64)
