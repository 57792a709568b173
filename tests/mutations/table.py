"""Mistakes that others made, in the algorithm and in its accounts, each as a change that a named test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """Replace ``old`` (which must occur exactly once in ``file``) by ``new``: then ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


TABLE = (
    Mutation(
        "the critic returns 0",
        "sao_core/models/critic.py",
        "last_hidden_state)\n        return at_previous(following), following",
        "last_hidden_state) * 0\n        return at_previous(following), following",
        "tests/sao_core/test_value_pretraining.py::test_critic_learns_a_reward_that_follows_from_the_prompt",
    ),
    Mutation(
        "V is read at t instead of t−1",
        "sao_core/models/critic.py",
        "return at_previous(following), following",
        "return following, following",
        "tests/sao_core/test_critic.py::test_value_of_a_token_is_read_one_position_before_it",
    ),
    Mutation(
        "the reward is put on the last attended token",
        "sao_core/rollout/recorder.py",
        "rewards[index] += value",
        "rewards[-1] += value",
        "tests/sao_core/test_rollout_agent.py::test_reward_on_an_observation_at_the_end_would_be_seen",
    ),
    Mutation(
        "the weight is clamped instead of zeroed",
        "sao_core/objectives.py",
        "weight = torch.where(keep, ratio * _wide(advantages.detach()), 0.0)",
        "weight = torch.where(\n"
        "        mask, log_ratio.nan_to_num().clamp(*_log_bounds(eps_low, eps_high)).exp()\n"
        "        * _wide(advantages.detach()), 0.0\n"
        "    )",
        "tests/sao_core/test_objectives.py",
    ),
    Mutation(
        "the weight is not detached",
        "sao_core/objectives.py",
        "    log_ratio = _log_ratio(logprobs, behavior_logprobs)\n"
        "    ratio = torch.exp(torch.where(keep, log_ratio, 0.0))",
        "    log_ratio = _wide(logprobs) - _wide(behavior_logprobs.detach())\n"
        "    ratio = torch.exp(torch.where(keep, log_ratio, 0.0))",
        "tests/sao_core/test_objectives.py",
    ),
    Mutation(
        "advantages are taken before the K updates",
        "sao_core/learner.py",
        "step.advantages = self._advantages(step, step.values, behind)",
        "step.advantages = self._advantages(step, step.values_before, behind)",
        "tests/sao_core/test_learner.py::test_advantages_use_values_from_after_the_critic_updates",
    ),
    Mutation(
        "rejected tokens leave the denominator",
        "sao_core/objectives.py",
        "total = _denominator(mask, num_action_tokens, weight)",
        "total = _denominator(keep, None, weight)",
        "tests/sao_core/test_objectives.py",
    ),
    Mutation(
        "the observation gap is not skipped",
        "sao_core/advantages.py",
        "reward, value, mask = rewards[rows].to(dtype), values[rows].to(dtype), action_mask[rows].bool()",
        "reward, value = rewards[rows].to(dtype).nan_to_num(), values[rows].to(dtype).nan_to_num()\n"
        "        mask = torch.ones_like(action_mask[rows].bool())",
        "tests/sao_core/test_advantages.py",
    ),
    Mutation(
        "attention is not frozen",
        "sao_core/algorithms.py",
        'MLP_PROJECTIONS = ("*.mlp.*_proj*",)',
        'MLP_PROJECTIONS = ("*_proj*",)',
        "tests/sao_core/test_critic.py::test_attention_router_embeddings_and_norms_are_frozen_by_default",
    ),
    Mutation(
        "behavior log-probabilities are recomputed by the learner",
        "sao_core/policy_update.py",
        "part.gather(batch.rows.behavior_logprobs),",
        "scores.detach(),",
        "tests/sao_core/test_learner.py::test_behavior_logprobs_are_those_recorded",
    ),
    Mutation(
        "the learner waits for in-flight rollouts",
        "infra/learner_ports.py",
        "if self._ledger.can_claim(self._run_id, step, self._batch_size):",
        'if not self._ledger.queue(self._run_id)["leased"] and self._ledger.can_claim(\n'
        "            self._run_id, step, self._batch_size\n"
        "        ):",
        "tests/infra/test_learner_ports.py::test_a_batch_is_claimed_while_other_rollouts_are_in_flight",
    ),
    Mutation(
        "a rewind leaves what later steps trained",
        "infra/ledger/updates.py",
        "connection.execute(update(TrajectoryEntry).where(*trained).values(**again))",
        "trained",
        "tests/infra/test_ledger_updates.py::test_rewind_makes_later_rollouts_ready_again_and_each_counts_once",
    ),
    Mutation(
        "after a rewind what was pending is generated at once",
        "infra/ledger/requests.py",
        "end is None or row.number <= end or row.purpose not in TRAINING",
        "True",
        "tests/infra/test_ledger_updates.py::test_after_a_rewind_nothing_new_is_generated_until_what_is_ready_is_within_the_bound",
    ),
    Mutation(
        "the manifest comes first",
        "infra/manifest.py",
        "    delete_folder(objects, key)\n    for entry in entries:",
        '    delete_folder(objects, key)\n    objects.put(f"{key}/{MANIFEST}", manifest)\n    for entry in entries:',
        "tests/infra/test_policy_store.py::test_the_manifest_comes_last_and_goes_first",
    ),
    Mutation(
        "a lease that somebody else took is recorded under",
        "infra/ledger/trajectories.py",
        "        and request.lease_worker == worker\n        and request.attempts == attempt\n",
        "",
        "tests/infra/test_ledger_requests.py::test_an_expired_lease_is_retaken_as_the_next_attempt_and_its_old_holder_is_fenced_off",
    ),
)
