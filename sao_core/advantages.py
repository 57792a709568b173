"""Advantages and returns of action tokens; what the environment inserted is skipped.

Pure functions of tensors, without gradient. A row is a rollout (all segments of one side by side). What
stands off the action mask never matters, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from sao_core.algorithms import Advantage, Algorithm
from sao_core.linear_scan import BackwardScan, Packer

if TYPE_CHECKING:
    from sao_core.config import AlgorithmConfig

GROUP_STD_FLOOR = 1e-6
WHITEN_STD_FLOOR = 1e-8
CPU_BLOCK_TOKENS = 2**19
"""Tokens of GAE worked on at once on a CPU, so that the temporaries stay in its cache."""
GPU_BLOCK_TOKENS = 2**28
"""The same on a GPU, where only memory sets a limit."""
EXACT_FLOAT32_COUNTS = 2**24
"""Float32 counts tokens exactly up to here."""


@overload
def adaptive_lambda(num_action_tokens: float, alpha: float = 1.5) -> float: ...
@overload
def adaptive_lambda(num_action_tokens: Tensor, alpha: float = 1.5) -> Tensor: ...
def adaptive_lambda(num_action_tokens: float | Tensor, alpha: float = 1.5) -> float | Tensor:
    """λ = 1 − 1/(α·l) of a rollout with l action tokens (paper, length-adaptive GAE); l = 1 gives 1/3.

    In float64, since float32 would keep two digits of 1 − λ at l = 131072. Never below 0 (l = 0, or α·l < 1).

    Args:
        num_action_tokens: l, a number or a tensor of any shape.
        alpha: α > 0.

    Returns:
        A float, or a float64 tensor of the same shape.

    Raises:
        ValueError: ``alpha`` is not positive.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0: got {alpha}")
    if isinstance(num_action_tokens, Tensor):
        scaled = (alpha * num_action_tokens.to(torch.float64)).clamp(min=1)
        return 1 - 1 / scaled
    return 1 - 1 / max(1.0, alpha * num_action_tokens)


@torch.no_grad()
def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_value: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor]:
    """Token-level GAE over action tokens only (paper, skip-observation GAE):

        δ_t = ρ_t + γ·V_next(t) − V_t,   Â_t = δ_t + γλ·Â_next(t),   next(t) = next index with m = 1

    Worked out through the λ-return G_t = Â_t + V_t: with H_t = c·ρ_t + γ(1−λ)·V_t + c·H_next(t) and c = γλ,
    G_t = ρ_t + H_next(t), where H beyond the end is γ·bootstrap. That is one scan of one array, and every
    intermediate is of the size of a return, however long the rollout.

    Args:
        rewards: (B, T), placed on action tokens; what stands elsewhere is not read.
        values: (B, T), V_t of the state in which x_t was chosen.
        action_mask: (B, T), true on action tokens.
        gamma: discount per action token.
        lam: λ, a number or (B,).
        bootstrap_value: V beyond the last action token, a number or (B,); 0 for a finished rollout.

    Returns:
        ``(advantages, returns)``, both (B, T) in the dtype of ``values`` (half precision: float32);
        returns = advantages + values on the mask; both 0 off the mask.

    Raises:
        ValueError: shapes that do not fit, γ or λ outside [0, 1].
    """
    _check_shapes(rewards=rewards, values=values, action_mask=action_mask)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1]: got {gamma}")
    num_rows, num_tokens = values.shape
    lams = _per_row(lam, "lam", values)
    outside = ~((lams >= 0) & (lams <= 1))
    if bool(outside.any()):
        raise ValueError(f"lam must be in [0, 1]: got {lams[outside][0].item()}")
    bootstraps = _per_row(bootstrap_value, "bootstrap_value", values)
    dtype = result = torch.float64 if values.dtype is torch.float64 else torch.float32
    if torch.get_float32_matmul_precision() != "highest" or num_tokens >= EXACT_FLOAT32_COUNTS:
        dtype = torch.float64
    advantages = torch.empty(values.shape, dtype=dtype, device=values.device)
    returns = torch.empty_like(advantages)
    if values.numel() == 0:
        return advantages.to(result), returns.to(result)
    room = CPU_BLOCK_TOKENS if values.device.type == "cpu" else GPU_BLOCK_TOKENS
    size = min(num_rows, max(1, room // num_tokens))
    packer = Packer(size, num_tokens, dtype, values.device)
    scan = BackwardScan(gamma * lams, packer.width, dtype)
    packed, scanned = torch.empty(2, size, packer.width, dtype=dtype, device=values.device)
    work = torch.empty(size, num_tokens, dtype=dtype, device=values.device)
    discount, step = (gamma * lams).to(dtype)[:, None], (gamma * (1 - lams)).to(dtype)[:, None]
    end = (gamma * bootstraps).to(dtype)[:, None]
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        reward, value, mask = rewards[rows].to(dtype), values[rows].to(dtype), action_mask[rows].bool()
        here = slice(0, len(mask))
        packer.place(mask)
        terms = torch.mul(reward, discount[rows], out=work[here]).addcmul_(value, step[rows])
        packer.pack(terms, end[rows], out=packed[here])
        scan.run(packed[here], rows, out=scanned[here])
        row_returns = packer.unpack_next(scanned[here], out=work[here]).add_(reward)
        packer.keep(row_returns, out=returns[rows])
        packer.keep(row_returns.sub_(value), out=advantages[rows])
    return advantages.to(result), returns.to(result)


@torch.no_grad()
def step_level_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    gamma: float,
    alpha: float,
    value_of: Literal["mean", "last"] = "mean",
    bootstrap_value: float | Tensor = 0.0,
) -> Tensor:
    """GAE over actions instead of tokens (paper, appendix): one advantage for all tokens of an action.

    An action is a run of neighbouring action tokens. Its reward is the sum over them, its value their mean or the
    last one's, γ counts actions, and λ = 1 − 1/(α · number of actions).

    Args:
        rewards: (B, T), placed on action tokens.
        values: (B, T), V_t of the state in which x_t was chosen.
        action_mask: (B, T), true on action tokens.
        gamma: discount per action.
        alpha: α of :func:`adaptive_lambda`.
        value_of: which value stands for an action.
        bootstrap_value: V beyond the last action, a number or (B,).

    Returns:
        advantages (B, T), 0 off the mask.

    Raises:
        ValueError: shapes that do not fit, γ outside [0, 1], an unknown ``value_of``.
    """
    _check_shapes(rewards=rewards, values=values, action_mask=action_mask)
    if value_of not in ("mean", "last"):
        raise ValueError(f"value_of must be `mean` or `last`: got {value_of!r}")
    dtype = torch.float64 if values.dtype is torch.float64 else torch.float32
    mask = action_mask.bool()
    if not bool(mask.any()):
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    begins, ends = mask.clone(), mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    ends[:, :-1] &= ~mask[:, 1:]
    num_actions = begins.sum(1)
    width = int(num_actions.max())
    action_of = (begins.cumsum(1) - 1).clamp(min=0)

    def per_action(x: Tensor, where: Tensor) -> Tensor:
        sums = torch.zeros(mask.shape[0], width, dtype=dtype, device=mask.device)
        return sums.scatter_add_(1, action_of, torch.where(where, x.to(dtype), 0.0))

    if value_of == "last":
        action_values = per_action(values, ends)
    else:
        action_values = per_action(values, mask) / per_action(mask, mask).clamp(min=1)
    exists = torch.arange(width, device=mask.device) < num_actions[:, None]
    lam = adaptive_lambda(num_actions, alpha)
    advantages, _ = skip_observation_gae(per_action(rewards, mask), action_values, exists, gamma, lam, bootstrap_value)
    return torch.where(mask, advantages.gather(1, action_of), 0.0)


def group_relative(scores: Tensor) -> Tensor:
    """(score − mean) / (std + 1e-6) over one group (GRPO), population std; all 0 where scores agree.

    Args:
        scores: (G,), one per rollout of a prompt.

    Returns:
        (G,)
    """
    scores = scores if scores.is_floating_point() else scores.to(torch.get_default_dtype())
    return (scores - scores.mean()) / (scores.std(correction=0) + GROUP_STD_FLOOR)


def running_mean(score: float, history: Sequence[float], window: int) -> float:
    """Score − mean of the last ``window`` earlier scores; the baseline is 0 without history.

    Args:
        score: of the rollout itself, which the history leaves out.
        history: earlier scores, oldest first: this prompt's, or the whole run's.
        window: how many of them count.

    Raises:
        ValueError: a window below 1.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1: got {window}")
    recent = history[-window:]
    return score - sum(recent) / len(recent) if recent else score


def whiten(advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Advantages with mean 0 and population std 1 over the action tokens of a batch; 0 off the mask.

    Args:
        advantages: (B, T).
        action_mask: (B, T), true on action tokens.
    """
    mask = action_mask.bool()
    kept = advantages[mask].double()
    if kept.numel() == 0:
        return torch.zeros_like(advantages)
    std = kept.std(correction=0) + WHITEN_STD_FLOOR
    return torch.where(mask, ((advantages.double() - kept.mean()) / std).to(advantages.dtype), 0.0)


def rollout_advantages(
    algorithm: Algorithm,
    settings: AlgorithmConfig,
    rewards: Tensor,
    values: Tensor | None,
    action_mask: Tensor,
    bootstrap_value: float | Tensor = 0.0,
    groups: Sequence[int] | Tensor | None = None,
    baselines: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """The advantages of a batch by its algorithm, whitened if the settings say so.

    Args:
        algorithm: resolved preset.
        settings: γ, α and whitening.
        rewards: (B, T), placed on action tokens; their sum is the score.
        values: (B, T), fresh values; None without a critic.
        action_mask: (B, T), true on action tokens.
        bootstrap_value: V beyond the last action token, a number or (B,).
        groups: B group numbers, for group-relative advantages.
        baselines: per row the earlier scores, oldest first, for running means.

    Returns:
        (B, T), 0 off the mask.

    Raises:
        ValueError: an input that the algorithm needs is missing.
    """
    kind = algorithm.advantage
    mask = action_mask.bool()
    if kind.needs_critic:
        if values is None:
            raise ValueError(f"values must be given for the advantage of {algorithm.name}: got None")
        if kind is Advantage.SKIP_OBSERVATION_GAE:
            lam = adaptive_lambda(mask.sum(1), settings.lambda_alpha)
            advantages, _ = skip_observation_gae(rewards, values, mask, settings.gamma, lam, bootstrap_value)
        else:
            value_of: Literal["mean", "last"] = "mean" if kind is Advantage.STEP_MEAN else "last"
            advantages = step_level_gae(
                rewards, values, mask, settings.gamma, settings.lambda_alpha, value_of, bootstrap_value
            )
    else:
        scores = torch.where(mask, rewards, 0.0).sum(1)
        if kind is Advantage.GROUP_RELATIVE:
            per_rollout = _against_group(algorithm, scores, groups)
        else:
            per_rollout = _against_history(algorithm, scores, baselines)
        advantages = torch.where(mask, per_rollout[:, None], 0.0)
    return whiten(advantages, mask) if settings.whiten_advantages else advantages


def _against_group(algorithm: Algorithm, scores: Tensor, groups: Sequence[int] | Tensor | None) -> Tensor:
    if groups is None or len(groups) != len(scores):
        got = "None" if groups is None else f"{len(groups)}"
        raise ValueError(
            f"groups must name the group of each of {len(scores)} rollouts for {algorithm.name}: got {got}"
        )
    numbers = torch.as_tensor(groups, device=scores.device)
    advantages = torch.empty_like(scores)
    for number in set(numbers.tolist()):
        members = numbers == number
        advantages[members] = group_relative(scores[members])
    return advantages


def _against_history(algorithm: Algorithm, scores: Tensor, baselines: Sequence[Sequence[float]] | None) -> Tensor:
    if baselines is None or len(baselines) != len(scores) or algorithm.window is None:
        got = "None" if baselines is None else f"{len(baselines)}"
        raise ValueError(
            f"baselines must give the earlier scores of each of {len(scores)} rollouts for {algorithm.name}: got {got}"
        )
    window = algorithm.window
    against = [running_mean(score, past, window) for score, past in zip(scores.tolist(), baselines, strict=True)]
    return torch.tensor(against, dtype=scores.dtype, device=scores.device)


def _per_row(x: float | Tensor, name: str, like: Tensor) -> Tensor:
    """A number or (B,) as (B,) float64 on the device of ``like``."""
    rows = torch.as_tensor(x, dtype=torch.float64, device=like.device)
    if rows.shape not in (torch.Size([]), torch.Size([like.shape[0]])):
        raise ValueError(f"{name} must be a number or of shape ({like.shape[0]},): got {tuple(rows.shape)}")
    return rows.expand(like.shape[0])


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{' and '.join(shapes)} must share one shape (B, T): got {listed}")
