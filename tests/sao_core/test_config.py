import pytest
from pydantic import BaseModel

from sao_core.config import ConfigError, TrainConfig, nearest, parse_config, setting_names


def refusal(values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_eps_outside_its_range_is_refused_with_value_and_rule():
    message = refusal({"algorithm": {"eps_low": 1.2}})
    assert message == "algorithm.eps_low must be less than 1: got 1.2"


def test_unknown_key_is_refused_with_the_nearest_name():
    assert refusal({"policy": {"lrr": 1e-4}}) == "unknown setting `policy.lrr`; did you mean `policy.lr`?"


def test_unknown_section_is_refused_with_the_nearest_name():
    assert "did you mean `rollout`?" in refusal({"rolout": {}})


def test_nucleus_sampling_is_refused_for_training():
    """Top-p multiplies every ratio by the surviving mass."""
    message = refusal({"rollout": {"top_p": 0.9}})
    assert "rollout.top_p must be 1" in message
    assert "got 0.9" in message


def test_top_k_is_refused_for_training():
    assert "rollout.top_k must be 0" in refusal({"rollout": {"top_k": 50}})


def test_staleness_bound_that_would_starve_is_refused():
    message = refusal({"asynchrony": {"run_ahead": 2, "max_token_age": 2, "stale": "reject"}})
    assert "a batch could never fill" in message
    assert "got 2" in message
    parse_config({"asynchrony": {"run_ahead": 2, "max_token_age": 3, "stale": "reject"}})
    parse_config({"asynchrony": {"run_ahead": 2, "max_token_age": 1, "stale": "mask"}})


def test_batch_must_hold_whole_groups():
    assert "multiple of the group size 8" in refusal({"algorithm": {"name": "grpo"}, "learner": {"batch_size": 12}})


def test_context_must_leave_room_for_the_prompt():
    assert "rollout.max_context_tokens must exceed" in refusal({"rollout": {"max_action_tokens": 512}})


def test_unknown_algorithm_names_the_choices():
    message = refusal({"algorithm": {"name": "ppo"}})
    assert "'sao'" in message
    assert "got 'ppo'" in message


def test_every_setting_is_documented():
    def undocumented(model: type[BaseModel]) -> list[str]:
        missing = [f"{model.__name__}.{k}" for k, f in model.model_fields.items() if not f.description]
        for field in model.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                missing += undocumented(field.annotation)
        return missing

    assert undocumented(TrainConfig) == []


def test_form_fields_keep_their_declared_order():
    properties = TrainConfig.model_json_schema()["$defs"]["PolicyConfig"]["properties"]
    assert [p["position"] for p in properties.values()] == list(range(len(properties)))


def test_synchronous_runs_never_run_ahead():
    config = parse_config({"asynchrony": {"enabled": False, "run_ahead": 3}})
    assert config.run_ahead == 0


def test_setting_names_cover_nested_sections():
    assert {"policy.lr", "critic.pretrain.rollouts", "seed"} <= set(setting_names(TrainConfig))


def test_nearest_lists_all_names_when_none_is_close():
    assert nearest("zzz", ["tiny", "smollm2"]) == "; there are: tiny, smollm2"
