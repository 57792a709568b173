import pytest

from flows.recipes import load_config, recipe_names, recipe_summary
from sao_core.config import ConfigError


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses_and_says_what_it_is_for(name):
    assert load_config(name).recipe == name
    assert len(recipe_summary(name)) > 20


def test_unknown_recipe_suggests_the_nearest():
    assert refusal("tinny") == "unknown recipe `tinny`; did you mean `tiny`?"


def test_missing_recipe_file_is_named():
    assert "no such recipe file: nowhere.yaml" in refusal("nowhere.yaml")


def test_overrides_are_typed():
    config = load_config("tiny", ["policy.lr=1e-4", "asynchrony.enabled=false", "asynchrony.keep_policies=null"])
    assert config.policy.lr == 1e-4
    assert config.asynchrony.enabled is False
    assert config.asynchrony.keep_policies is None


def test_unknown_override_suggests_the_nearest():
    assert refusal("tiny", "policy.learning_rate=1").startswith("unknown setting `policy.learning_rate`")


def test_override_without_value_is_refused():
    assert refusal("tiny", "policy.lr") == "--set needs section.key=value: got 'policy.lr'"


def test_environment_options_pass_through():
    config = load_config("tiny", ["environment.options.anything=3"])
    assert config.environment.options["anything"] == 3


def test_yaml_file_is_a_recipe_named_after_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("policy:\n  lr: 0.5\n")
    config = load_config(str(path))
    assert (config.recipe, config.policy.lr) == ("mine", 0.5)


def test_broken_yaml_is_one_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("policy: [1, 2\n")
    message = refusal(str(path))
    assert "not valid YAML" in message
    assert "\n" not in message
