"""The critic: the policy's architecture and initial weights with a scalar head in place of the vocabulary's.

On disk it is a Hugging Face folder of the backbone plus `value_head.safetensors`, kept as `critic/` beside the policy
that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from sao_core.config import ConfigError
from sao_core.models.policy import load_backbone, load_policy

HEAD_FILE = "value_head.safetensors"


def at_previous(per_position: Tensor) -> Tensor:
    """Move what was computed at position t−1 to token t: (B, T, …) → (B, T, …), zeros at t = 0.

    The state in which token t is chosen ends at token t−1; values and next-token scores are both read there. This is
    the only place where that shift is made.
    """
    return torch.cat([torch.zeros_like(per_position[:, :1]), per_position[:, :-1]], dim=1)


class ValueHead(nn.Module):
    """Hidden states (…, H) → values (…) in float32. Starts at 0 for every state."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Computed in float32 whatever the backbone's precision."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class Critic(nn.Module):
    """Backbone of a causal LM with a value head."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.model = backbone
        self.head = ValueHead(backbone.config.get_text_config().hidden_size).to(backbone.device)

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Values of right-padded token ids (B, T).

        Returns (values, following), both (B, T) float32. ``values[:, t]`` is V of the state in which token t is chosen,
        read at t−1 (0 at t = 0). ``following[:, t]`` is V of the state after token t, read at t: the bootstrap of a
        sequence cut behind t. Causal attention keeps both free of what stands to the right, padding included.
        """
        following = self.head(self.model(input_ids=token_ids, use_cache=False).last_hidden_state)
        return at_previous(following), following

    @classmethod
    def from_policy(cls, folder: Path | str, dtype: str | torch.dtype, device: str | torch.device) -> Critic:
        """A fresh critic with the weights of the policy in ``folder`` and a head of zeros."""
        return cls(load_policy(folder, dtype, device).base_model)

    @classmethod
    def load(cls, folder: Path | str, dtype: str | torch.dtype, device: str | torch.device) -> Critic:
        """Read what :func:`save_critic` wrote. Raises ConfigError if the folder holds no critic."""
        head = Path(folder) / HEAD_FILE
        if not head.is_file():
            raise ConfigError(f"{folder} holds no critic: it has no {HEAD_FILE}")
        critic = cls(load_backbone(folder, dtype, device))
        critic.head.load_state_dict(load_file(head))
        return critic


def save_critic(critic: Critic, folder: Path | str, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write backbone and head. ``state_dict`` (by the critic's parameter names) replaces its own weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = critic.state_dict() if state_dict is None else state_dict
    backbone = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    head = {name.removeprefix("head."): tensor for name, tensor in state.items() if name.startswith("head.")}
    critic.model.save_pretrained(folder, state_dict=backbone)
    save_file({name: tensor.detach().float().cpu().contiguous() for name, tensor in head.items()}, folder / HEAD_FILE)


def freeze(critic: Critic, trainable: Sequence[str] | None) -> None:
    """Let only the parameters train whose names match a pattern (fnmatch), and the head; None trains everything.

    Raises ConfigError for a pattern that matches nothing, or if only the head would train (paper section 3).
    """
    names = [name for name, _ in critic.named_parameters()]
    chosen = set(names)
    if trainable is not None:
        for pattern in trainable:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"critic.trainable: {pattern!r} matches no parameter; names look like {names[len(names) // 2]!r}"
                )
        chosen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in trainable)}
        if not any(name.startswith("model.") for name in chosen):
            raise ConfigError(
                f"critic.trainable={list(trainable)} leaves nothing to train but the head; "
                "name MLP or MoE projections, e.g. `*.mlp.*_proj*`"
            )
    for name, parameter in critic.named_parameters():
        parameter.requires_grad_(name in chosen or name.startswith("head."))
