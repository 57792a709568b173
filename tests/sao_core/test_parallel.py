"""DeepSpeed engines: the same step as plain PyTorch, skipped non-finite gradients, and complete checkpoints."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_fixtures import build_model_folder
from torch import nn

from sao_core.algorithms import PRESETS
from sao_core.config import ConfigError
from sao_core.models.critic import Critic, freeze
from sao_core.parallel import Engine, NonFiniteGradients, OptimizerSettings

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def _module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def _engine(module: nn.Module, stage: int = 1, dtype: torch.dtype = torch.float32, **settings: float) -> Engine:
    return Engine(module, OptimizerSettings(**{"lr": 0.01, **settings}), zero_stage=stage, dtype=dtype, device=CPU)


def _frozen_critic(folder: Path) -> Critic:
    critic = Critic.from_policy(folder, "float32", "cpu")
    freeze(critic, PRESETS["sao"].critic_trainable)
    critic.model.enable_input_require_grads()
    return critic


def _train(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        values, _ = engine(IDS)
        engine.backward((values - 1).square().mean(), last=True)
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_is_that_of_plain_adamw_with_clipping(stage: int) -> None:
    plain, inputs = _module(), torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    engine = _engine(_module(), stage, grad_clip=0.5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for number in (0, 1):
            engine.backward(engine(inputs[2 * number : 2 * number + 2]).square().sum() / 4, last=number == 1)
        step = engine.step()
        (plain(inputs).square().sum() / 4).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert step.applied
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)
    state = engine.state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_learning_rate_rises_over_the_warm_up() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4)
    assert [settings.lr_at(update) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert OptimizerSettings(lr=0.5).lr_at(0) == 0.5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nonfinite_gradient_is_skipped_counted_and_stops_the_run_at_the_third(stage: int) -> None:
    engine = _engine(_module(), stage)
    before = engine.state_dict()

    def step(factor: float) -> bool:
        engine.backward(engine(torch.ones(2, 3)).sum() * factor, last=True)
        return engine.step().applied

    assert not step(math.nan)
    assert not step(math.inf)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
    assert step(1.0)
    assert (engine.updates, engine.skipped) == (1, 2)
    after = engine.state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert not step(math.nan)
    assert not step(math.nan)
    with pytest.raises(NonFiniteGradients, match="3 gradients in a row"):
        step(math.nan)
    assert all(torch.equal(after[name], tensor) for name, tensor in engine.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoint_with_a_frozen_critic_restores_weights_and_optimizer(tmp_path: Path, stage: int) -> None:
    folder = build_model_folder(tmp_path / "policy", vocabulary=128)
    engine = _engine(_frozen_critic(folder), stage)
    frozen = {n: p.detach().clone() for n, p in _frozen_critic(folder).named_parameters() if not p.requires_grad}
    _train(engine, 2)
    engine.save(tmp_path / "checkpoint")
    saved = engine.state_dict()
    _train(engine, 2)
    expected = engine.state_dict()

    other = _frozen_critic(build_model_folder(tmp_path / "other", seed=9, vocabulary=128))
    resumed = _engine(other, stage)
    resumed.load(tmp_path / "checkpoint")
    restored = resumed.state_dict()
    assert restored.keys() == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in restored.items())
    assert all(torch.equal(frozen[name], restored[name]) for name in frozen), "frozen weights must survive"
    assert resumed.updates == 2
    _train(resumed, 2)
    assert all(torch.equal(expected[name], tensor) for name, tensor in resumed.state_dict().items())


def test_settings_changed_since_the_checkpoint_take_effect(tmp_path: Path) -> None:
    engine = _engine(_module())
    engine.backward(engine(torch.ones(2, 3)).sum(), last=True)
    engine.step()
    engine.save(tmp_path / "checkpoint")
    before = engine.state_dict()
    resumed = _engine(_module(), lr=0.0)
    resumed.load(tmp_path / "checkpoint")
    resumed.backward(resumed(torch.ones(2, 3)).sum(), last=True)
    assert resumed.step().applied
    assert all(torch.equal(before[name], tensor) for name, tensor in resumed.state_dict().items())


@pytest.mark.parametrize("stage", [1, 3])
def test_value_head_is_whole_and_trains_under_sharding(tmp_path: Path, stage: int) -> None:
    engine = _engine(_frozen_critic(build_model_folder(tmp_path / "policy")), stage)
    assert engine.state_dict()["head.weight"].shape == (1, 32)
    assert not engine.state_dict()["head.weight"].any()
    _train(engine, 1)
    assert engine.state_dict()["head.weight"].all()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_keeps_a_float32_copy_that_small_steps_add_up_in(stage: int) -> None:
    module = nn.Linear(4, 1, bias=False)
    module.weight.data.fill_(1.0)
    engine = _engine(module.bfloat16(), stage, torch.bfloat16, lr=1e-3)
    for _ in range(20):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum(), last=True)
        engine.step()
    weight = engine.state_dict()["weight"]
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(weight.float(), torch.full((1, 4), 0.98), rtol=0, atol=0.004)


def test_bfloat16_without_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage must be 1, 2 or 3"):
        _engine(_module().bfloat16(), 0, torch.bfloat16)


def test_two_engines_live_in_one_process() -> None:
    first, second = _engine(_module()), _engine(_module(), lr=0.02)
    for engine in (first, second):
        engine.backward(engine(torch.ones(2, 3)).sum(), last=True)
    first.step()
    second.step()
    start = _module()[0].bias.detach()
    moved = [float((engine.state_dict()["0.bias"] - start).abs().max()) for engine in (first, second)]
    assert moved == pytest.approx([0.01, 0.02], rel=1e-3)


ALONE = """
import torch
from sao_core.parallel import Engine, OptimizerSettings
module, settings = torch.nn.Linear(3, 1), OptimizerSettings(lr=0.1)
engine = Engine(module, settings, zero_stage=1, dtype=torch.float32, device=torch.device("cpu"))
engine.backward(engine(torch.ones(2, 3)).sum(), last=True)
assert engine.step().applied
"""


def test_engine_needs_no_environment_and_no_compiler_and_says_nothing(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
