"""Mixture-of-experts layers on a CPU, where Transformers' loop over experts spends its time on looking up tokens.

Few tokens, as in a decoding step: every expert runs on every token in one product, and routing weights of 0 drop what
was not chosen. Many tokens: they are sorted by expert once, then each expert takes its slice. Both give the numbers of
the loop. Registered with Transformers under a name of its own; knows no training and no cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

CPU_EXPERTS = "sao_cpu"
WASTED_PRODUCTS = 2**22
"""Multiplications on experts not chosen, per projection, that cost less than visiting the experts one by one: measured
to break even at 4.4–4.9 million for models of 4 and 8 experts."""


def cpu_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Route (N, H) through the (N, k) experts chosen for each token, weighted by (N, k) → (N, H)."""
    count, chosen = indices.shape
    _, size, intermediate = experts.down_proj.shape
    if count * (experts.num_experts - chosen) * size * intermediate <= WASTED_PRODUCTS:
        return _all_experts(experts, hidden, indices, weights)
    return _sorted_tokens(experts, hidden, indices, weights)


def _all_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    count, size = hidden.shape
    routing = weights.new_zeros(count, experts.num_experts).scatter(1, indices, weights)
    projected = linear(hidden, experts.gate_up_proj.reshape(-1, size)).view(count, experts.num_experts, -1)
    gated = experts._apply_gate(projected) * routing.unsqueeze(2)
    return torch.bmm(gated.transpose(0, 1), experts.down_proj.transpose(1, 2)).sum(0)


def _sorted_tokens(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    flat = indices.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.num_experts).tolist()
    token = order.div(indices.shape[1], rounding_mode="floor")
    outputs = []
    groups = hidden.index_select(0, token).split(counts)  # type: ignore[no-untyped-call]
    for expert, group in enumerate(groups):
        if group.shape[0]:
            gated = experts._apply_gate(linear(group, experts.gate_up_proj[expert]))
            outputs.append(linear(gated, experts.down_proj[expert]))
    weighted = torch.cat(outputs) * weights.reshape(-1).index_select(0, order).unsqueeze(1)
    return torch.zeros_like(hidden).index_add_(0, token, weighted.to(hidden.dtype))


def use_cpu_experts(model: PreTrainedModel) -> None:
    """Switch a model with plain fused experts to :func:`cpu_experts`; leave any other as it is."""
    fused = [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "gate_up_proj")]
    plain = all(
        module.has_gate and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
        for module in fused
    )
    if fused and plain and model._can_set_experts_implementation():
        model.set_experts_implementation(CPU_EXPERTS)


ALL_EXPERTS_FUNCTIONS.register(CPU_EXPERTS, cpu_experts)
