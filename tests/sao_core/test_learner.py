"""One training step: its order, what enters it, and that nothing depends on how the batch was cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fixtures import build_model_folder, make_batch, make_config, make_trajectory, random_rollouts
from torch import Tensor

from sao_core.advantages import adaptive_lambda, skip_observation_gae
from sao_core.config import ConfigError
from sao_core.learner import Learner
from sao_core.models.policy import load_policy
from sao_core.parallel import NonFiniteGradients
from sao_core.protocols import Batch
from sao_core.trajectory import Outcome, Sampling

NEWEST = {1: 0}
"""Version 1 is the policy of step 0: in step 1, its tokens have age 0."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("models") / "policy")


def _learner(folder: Path, **sections: dict[str, Any]) -> Learner:
    return Learner(make_config(**sections), folder, seed=0, device="cpu")


def _step(learner: Learner, batch: Batch) -> dict[str, float]:
    return learner.update_value(batch, NEWEST) | learner.update_policy()


def _state(learner: Learner) -> dict[str, Tensor]:
    state = {f"policy/{name}": tensor for name, tensor in learner.policy.engine.state_dict().items()}
    return state | {f"critic/{name}": tensor for name, tensor in learner.critic.engine.state_dict().items()}


def _moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def _on_policy(folder: Path, count: int = 8) -> list[tuple[Any, ...]]:
    """Random rollouts worth 1 or −1, whose recorded log-probabilities are those of the policy in ``folder``."""
    model = load_policy(folder)
    rollouts = []
    for (trajectory,) in random_rollouts(count):
        ids, mask = trajectory.token_ids, trajectory.action_mask
        scores = torch.log_softmax(model(input_ids=torch.tensor(ids)[None].long()).logits[0], -1).detach()
        own = scores[np.arange(len(ids)) - 1, ids].numpy() * mask
        score = 2 * trajectory.score - 1
        rollouts.append((make_trajectory(trajectory.request_number, ids, mask, score, behavior_logprobs=own),))
    return rollouts


@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_step_does_not_depend_on_the_cut_into_micro_batches(folder: Path, budget: int) -> None:
    batch = make_batch(random_rollouts(8))
    reference, other = _learner(folder), _learner(folder, learner={"micro_batch_tokens": budget})
    expected, metrics = _step(reference, batch), _step(other, batch)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, tensor in _state(reference).items():
        torch.testing.assert_close(_state(other)[name], tensor, rtol=1e-4, atol=1e-5)


def test_same_seed_gives_the_same_bits(folder: Path) -> None:
    states = []
    for _ in range(2):
        learner = _learner(folder)
        for step in (1, 2):
            _step(learner, make_batch(random_rollouts(8, seed=step), step))
        states.append(_state(learner))
    assert not _moved(*states)


def test_critic_makes_k_updates_and_its_attention_stays_frozen(folder: Path) -> None:
    learner = _learner(folder)
    before = _state(learner)
    metrics = learner.update_value(make_batch(random_rollouts(8)), NEWEST)
    assert metrics["value/updates"] == 2
    assert learner.critic.engine.updates == 2
    experts = {f"critic/model.layers.{i}.mlp.experts.{n}" for i in (0, 1) for n in ("gate_up_proj", "down_proj")}
    assert _moved(before, _state(learner)) == experts | {"critic/head.weight", "critic/head.bias"}
    single = _learner(folder, algorithm={"name": "sao-single-update"})
    assert single.update_value(make_batch(random_rollouts(8)), NEWEST)["value/updates"] == 1
    assert single.critic.engine.updates == 1


def test_advantages_use_values_from_after_the_critic_updates(folder: Path) -> None:
    learner = _learner(folder, critic={"lr": 0.01})
    batch = make_batch(random_rollouts(8))
    _step(learner, batch)
    data = learner.prepare(batch.rollouts)
    fresh, _ = learner.critic.values(data)
    lam = adaptive_lambda(data.rows.action_mask.sum(1))
    expected, _ = skip_observation_gae(data.rows.rewards, fresh, data.rows.action_mask, 1.0, lam)
    for row, (trajectory,) in enumerate(batch.rollouts):
        record = learner.token_records()[trajectory.trajectory_id]
        length = trajectory.num_tokens
        np.testing.assert_allclose(record["advantages"], expected[row, :length], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(record["values"], fresh[row, :length], rtol=1e-5, atol=1e-6)
        assert not record["values_before"].any(), "a new critic's head is 0"
        assert record["values"][trajectory.action_mask].all()


def test_behavior_logprobs_are_those_recorded(folder: Path) -> None:
    (trajectory,) = random_rollouts(1)[0]
    learner = _learner(folder)
    own = learner.policy.logprobs(learner.prepare([(trajectory,)]))[0].numpy()
    mask = trajectory.action_mask

    def step_with(ratio: float) -> tuple[dict[str, float], Any]:
        behavior = np.where(mask, own - np.float32(math.log(ratio)), np.float32(0))
        changed = make_trajectory(0, trajectory.token_ids, mask, 1.0, behavior_logprobs=behavior)
        learner = _learner(folder)
        return _step(learner, make_batch([(changed,)])), learner.token_records()["t0"]

    metrics, record = step_with(5.9)
    assert metrics["policy/loss"] == pytest.approx(-5.9 * np.mean((record["advantages"] * own)[mask]), rel=1e-4)
    assert metrics["policy/ratio_mean"] == pytest.approx(5.9, rel=1e-4)
    assert record["kept"].sum() == mask.sum()
    metrics, record = step_with(6.1)
    assert (metrics["policy/loss"], metrics["policy/grad_norm"], metrics["policy/band_rejected"]) == (0.0, 0.0, 1.0)
    assert not record["kept"].any()


def test_policy_follows_the_sign_of_the_advantage(folder: Path) -> None:
    rollouts = _on_policy(folder)
    learner = _learner(folder)
    data = learner.prepare(rollouts)
    before = learner.policy.logprobs(data)
    metrics = _step(learner, make_batch(rollouts))
    change = (learner.policy.logprobs(data) - before).sum(1)
    scores = torch.tensor([r[0].score for r in rollouts])
    assert float(change[scores == 1].mean()) > 0 > float(change[scores == -1].mean())
    assert learner.policy_moved
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/ess"] == pytest.approx(1.0, abs=1e-4)


def test_policy_rests_before_its_first_update_step(folder: Path) -> None:
    learner = _learner(folder, policy={"first_update_step": 2})
    before = _state(learner)
    metrics = _step(learner, make_batch(random_rollouts(8), step=1))
    assert not learner.policy_moved
    assert not [name for name in _moved(before, _state(learner)) if name.startswith("policy/")]
    assert "policy/loss" not in metrics
    assert "value/explained_variance_fit" in metrics
    learner.update_value(make_batch(random_rollouts(8), step=2), NEWEST)
    assert "policy/loss" in learner.update_policy()
    assert learner.policy_moved


def test_fully_rejected_batch_is_exactly_zero_and_the_step_goes_on(folder: Path) -> None:
    trajectories = [
        make_trajectory(
            0, t.token_ids, t.action_mask, 1.0, behavior_logprobs=np.where(t.action_mask, -200, 0).astype(np.float32)
        )
        for (t,) in random_rollouts(1)
    ]
    learner = _learner(folder)
    before = _state(learner)
    metrics = _step(learner, make_batch([(t,) for t in trajectories]))
    assert (metrics["policy/loss"], metrics["policy/grad_norm"], metrics["policy/band_rejected"]) == (0.0, 0.0, 1.0)
    assert not [name for name in _moved(before, _state(learner)) if name.startswith("policy/")]


def test_third_nonfinite_gradient_in_a_row_stops_with_the_policy_intact(folder: Path) -> None:
    learner = _learner(folder)
    before = _state(learner)
    rollouts = random_rollouts(4)
    rollouts[0][0].rewards[np.flatnonzero(rollouts[0][0].action_mask)[-1]] = np.inf
    metrics = _step(learner, make_batch(rollouts, 1))
    assert (metrics["value/skipped_updates"], metrics["policy/skipped_updates"]) == (2, 1)
    assert not learner.policy_moved
    with pytest.raises(NonFiniteGradients):
        learner.update_value(make_batch(rollouts, 2), NEWEST)
    assert not _moved(before, _state(learner))


def test_what_failed_is_never_trained_on_and_says_why(folder: Path) -> None:
    rollouts = random_rollouts(5)
    ids, mask = rollouts[0][0].token_ids, rollouts[0][0].action_mask
    rollouts[1] = (make_trajectory(1, ids, mask, 0.0, outcome=Outcome.FAILED),)
    rollouts[2] = (make_trajectory(2, ids, mask, 0.0, outcome=Outcome.BLOCKED),)
    rollouts[3] = (make_trajectory(3, ids, mask, 1.0, sampling=Sampling(top_p=0.9)),)
    learner = _learner(folder)
    metrics = _step(learner, make_batch(rollouts))
    assert learner.trained_ids == ("t0", "t4")
    assert learner.rejected == {"t1": "failed", "t2": "blocked", "t3": "sampling"}
    assert set(learner.token_records()) == {"t0", "t4"}
    assert metrics["rollout/rejected/failed"] == 1
    assert metrics["reward/mean"] == pytest.approx(np.mean([0.0, 1.0, 0.0]))


def test_batch_with_nothing_left_is_a_step_that_changes_nothing(folder: Path) -> None:
    (trajectory,) = random_rollouts(1)[0]
    failed = make_trajectory(0, trajectory.token_ids, trajectory.action_mask, 0.0, outcome=Outcome.FAILED)
    learner = _learner(folder)
    before = _state(learner)
    metrics = _step(learner, make_batch([(failed,)]))
    assert not _moved(before, _state(learner))
    assert (learner.policy_moved, learner.trained_ids, learner.token_records()) == (False, (), {})
    assert metrics["rollout/tokens_total"] == failed.num_tokens


def _cut_short(folder: Path, truncation: str) -> tuple[Learner, dict[str, float]]:
    (trajectory,) = random_rollouts(1)[0]
    cut = make_trajectory(0, trajectory.token_ids, trajectory.action_mask, 0.0, outcome=Outcome.TRUNCATED)
    whole = make_trajectory(1, trajectory.token_ids, trajectory.action_mask, 1.0)
    learner = _learner(folder, algorithm={"truncation": truncation})
    state = learner.critic.engine.state_dict()
    state["head.bias"] += 0.5
    learner.renew_critic(learner.algorithm.critic_trainable, weights=state)
    return learner, learner.update_value(make_batch([(cut,), (whole,)]), NEWEST)


def test_truncated_rollouts_are_failures_bootstrapped_or_left_out(folder: Path) -> None:
    learner, metrics = _cut_short(folder, "zero")
    assert metrics["value/return_std"] == pytest.approx(0.5)
    assert metrics["rollout/truncated"] == 0.5
    learner, metrics = _cut_short(folder, "bootstrap")
    assert metrics["value/return_std"] == pytest.approx(0.25), "returns are V = 0.5 and 1"
    learner, metrics = _cut_short(folder, "exclude")
    assert learner.trained_ids == ("t1",)
    assert learner.rejected == {"t0": "truncated"}


def test_bootstrap_without_a_critic_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="truncation=bootstrap needs a critic"):
        _learner(folder, algorithm={"name": "running-mean", "truncation": "bootstrap"})


def _aged(versions: list[int]) -> Any:
    return make_trajectory(
        versions[0], [5, 6, 7], [False, True, True], 1.0, policy_versions=np.array([-1, *versions], np.int32)
    )


def test_age_counts_from_the_step_whose_policy_is_trained(folder: Path) -> None:
    learner = _learner(folder)
    batch = make_batch([(_aged([3, 7]),), (_aged([9, 9]),)], step=6)
    metrics = learner.update_value(batch, {3: 1, 7: 4, 9: 5})
    ages = {name.removeprefix("staleness/"): value for name, value in metrics.items() if "staleness" in name}
    assert ages == {"mean": 1.25, "max": 4.0, "queue": 0.5, "generation": 1.5}


def test_old_tokens_are_masked_or_their_rollout_rejected(folder: Path) -> None:
    steps = {3: 1, 7: 4, 9: 5}
    batch = make_batch([(_aged([3, 7]),), (_aged([9, 9]),)], step=6)
    masking = _learner(folder, asynchrony={"max_token_age": 3})
    masking.update_value(batch, steps)
    metrics = masking.update_policy()
    assert masking.trained_ids == ("t3", "t9")
    assert metrics["policy/tokens_over_age"] == 0.25
    assert not masking.token_records()["t3"]["kept"][1]
    rejecting = _learner(folder, asynchrony={"max_token_age": 3, "stale": "reject"})
    rejecting.update_value(batch, steps)
    assert rejecting.rejected == {"t3": "stale"}


def test_group_and_history_advantages_need_no_critic(folder: Path) -> None:
    rollouts = [(make_trajectory(i, [5, 6 + i, 7], [False, True, True], float(i == 0), group=0),) for i in range(4)]
    grouped = _learner(folder, algorithm={"name": "grpo-dis", "group_size": 4})
    metrics = _step(grouped, make_batch(rollouts))
    assert not [name for name in metrics if name.startswith("value/")]
    assert grouped.policy_moved
    assert grouped.token_records()["t0"]["advantages"].tolist() == pytest.approx([0, 3**0.5, 3**0.5], rel=1e-4)
    history = _learner(folder, algorithm={"name": "running-mean"})
    _step(history, make_batch(rollouts, baselines={"t0": (0.0, 0.5), "t1": (1.0,)}))
    records = history.token_records()
    assert [float(records[f"t{i}"]["advantages"][1]) for i in range(3)] == [0.75, -1.0, 0.0]


def test_logprob_gap_is_nothing_on_own_samples_and_shows_another_temperature(folder: Path) -> None:
    rollouts = _on_policy(folder)
    assert _learner(folder).logprob_gap(rollouts) < 1e-5
    assert _learner(folder, rollout={"temperature": 0.7}).logprob_gap(rollouts) > 0.05


def test_step_of_segments_trains_on_all_of_them(folder: Path) -> None:
    first = make_trajectory(0, [5, 6, 7], [False, True, True], 0.0, num_segments=2)
    second = make_trajectory(1, [8, 9, 10], [False, True, True], 1.0, segment=1, num_segments=2)
    learner = _learner(folder)
    _step(learner, make_batch([(first, second)]))
    assert learner.trained_ids == ("t0", "t1")
    assert learner.token_records()["t0"]["advantages"][1:].all(), "the reward in the second segment reaches the first"


@pytest.mark.parametrize("name", ["vapo", "sao-step-mean", "sao-step-last", "sao-full-critic", "sao-dis-only"])
def test_every_critic_preset_makes_a_step(folder: Path, name: str) -> None:
    learner = _learner(folder, algorithm={"name": name})
    metrics = _step(learner, make_batch(random_rollouts(8)))
    assert learner.policy_moved
    assert np.isfinite(list(metrics.values())).all()


def test_penalties_change_the_gradient(folder: Path) -> None:
    batch = make_batch(_on_policy(folder))
    states = []
    for penalty in ({}, {"kl_coef": 1.0}, {"entropy_coef": 1.0}):
        learner = _learner(folder, policy=penalty)
        data = learner.prepare(batch.rollouts)
        _step(learner, batch)
        states.append(learner.policy.logprobs(data))
    assert torch.allclose(states[0], states[1], atol=1e-4), "KL to the policy itself has no gradient"
    assert not torch.allclose(states[0], states[2], atol=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputing_activations_changes_no_number(folder: Path, stage: int) -> None:
    batch = make_batch(random_rollouts(8))
    plain = _learner(folder, learner={"zero_stage": stage})
    saving = _learner(folder, learner={"zero_stage": stage}, model={"gradient_checkpointing": True})
    assert _step(saving, batch) == pytest.approx(_step(plain, batch), rel=1e-5, abs=1e-6)
    assert saving.policy.engine.module.policy.is_activation_checkpointing


@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_trains_close_to_float32(folder: Path, stage: int) -> None:
    batch = make_batch(_on_policy(folder))
    half = _learner(folder, model={"dtype": "bfloat16"}, learner={"zero_stage": stage})
    assert half.logprob_gap(batch.rollouts) < 0.1
    expected, metrics = _step(_learner(folder), batch), _step(half, batch)
    for name in ("value/loss", "value/grad_norm", "policy/loss", "policy/grad_norm", "policy/entropy"):
        assert metrics[name] == pytest.approx(expected[name], rel=0.1, abs=0.02), name


def test_version_without_a_step_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="policy version 1 has no step"):
        _learner(folder).update_value(make_batch(random_rollouts(2)), {0: 0})
