"""LoRA on the policy (Hu et al. 2021, through peft): small matrices train, the weights beside them stand still.

What is published, exported and sampled from is the merged model, an ordinary folder; only the learner has adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sao_core.config import ConfigError, LoraConfig

_BASE = ".base_layer."
_ADAPTER = re.compile(r"\.lora_[AB]\.")


def add_lora(policy: PreTrainedModel, settings: LoraConfig) -> None:
    """Put adapters into ``policy`` in place and freeze everything else; the function it computes stays the same.

    Raises ConfigError if peft is not installed or `policy.lora.targets` names no linear layer.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "policy.lora needs a package that is not installed: pip install 'sao-pipeline[lora]'"
        ) from None
    targets: str | list[str] = "all-linear" if settings.targets is None else list(settings.targets)
    config = peft.LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        peft.inject_adapter_in_model(config, policy)
    except ValueError as error:
        raise ConfigError(f"policy.lora.targets does not fit the model: {str(error).partition('.')[0]}") from error
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(_ADAPTER.search(name) is not None)


@torch.no_grad()
def merge_lora(state: Mapping[str, Tensor], settings: LoraConfig) -> dict[str, Tensor]:
    """The weights of the plain model: W + alpha/rank · B·A where there is an adapter, by the model's own names."""
    merged = {}
    for name, tensor in state.items():
        if _ADAPTER.search(name):
            continue
        weight = tensor
        if name.endswith(f"{_BASE}weight"):
            layer = name.removesuffix(f"{_BASE}weight")
            a, b = state[f"{layer}.lora_A.default.weight"], state[f"{layer}.lora_B.default.weight"]
            weight = (tensor.float() + settings.alpha / settings.rank * (b.float() @ a.float())).to(tensor.dtype)
        merged[name.replace(_BASE, ".")] = weight
    return merged
