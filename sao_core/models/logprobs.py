"""Log-probabilities of the tokens that were sampled, under the policy being trained.

Logits exist for one chunk of action tokens at a time, in the forward and in the backward pass, so memory does not
grow with tokens × vocabulary. Nothing is computed for prompt, observation or padding tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sao_core.config import ConfigError

Head = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    head: Head,
    token_ids: Tensor,
    action_mask: Tensor,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """log π(x_t) and the entropy of π at the position that chose x_t.

    ``hidden`` (B, T, H), ``token_ids`` and ``action_mask`` (B, T); ``head`` maps (n, H) to logits (n, V). Logits are
    divided by ``temperature`` and normalised in float32, as the sampler does. Returns two (B, T) float32 tensors, 0
    off the mask; the entropy is detached. ``action_mask[:, 0]`` must be False: nothing precedes token 0.
    """
    chosen = action_mask[:, 1:]
    states, targets = hidden[:, :-1][chosen], token_ids[:, 1:][chosen]
    count = targets.shape[0]
    if count <= chunk_tokens:
        logprobs, entropy = _chunk_scores(states, targets, head, temperature)
    else:
        chunks = -(-count // chunk_tokens)
        parts = [
            checkpoint(_chunk_scores, part, ids, head, temperature, use_reentrant=False)
            for part, ids in zip(states.chunk(chunks), targets.chunk(chunks), strict=True)
        ]
        logprobs, entropy = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    blank = torch.zeros(token_ids.shape, dtype=torch.float32, device=hidden.device)
    return blank.masked_scatter(action_mask, logprobs), blank.masked_scatter(action_mask, entropy)


def _chunk_scores(states: Tensor, targets: Tensor, head: Head, temperature: float) -> tuple[Tensor, Tensor]:
    """(n, H) and (n,) → log-probabilities and entropies, each (n,)."""
    scores = torch.log_softmax(head(states).float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


class TokenScorer(nn.Module):
    """The policy as the learner runs it: token ids in, log-probabilities of the sampled ones out."""

    def __init__(self, policy: PreTrainedModel, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.policy = policy
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, token_ids: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Right-padded (B, T) ids and mask → log-probabilities and entropies, as :func:`token_logprobs`."""
        hidden = self.policy.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return token_logprobs(hidden, self.logits, token_ids, action_mask, self.temperature, self.chunk_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (…, H) → logits (…, V), with the scalings that some architectures put behind the head."""
        logits = self.policy.get_output_embeddings()(hidden)
        config = self.policy.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def check(self) -> None:
        """Raise ConfigError if the architecture makes its logits in a way that :meth:`logits` does not know."""
        ids = torch.arange(4, device=self.policy.device).unsqueeze(0)
        ours = self.logits(self.policy.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
        theirs = self.policy(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3):
            raise ConfigError(
                f"{type(self.policy).__name__} changes its logits behind the output head in a way that is not known "
                "here, so log-probabilities cannot be computed in chunks; use another architecture"
            )


def disable_dropout(model: nn.Module) -> None:
    """Ratios compare two policies, so the forward pass must be the same function that sampled the tokens."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
