"""DeepSpeed engines behind five verbs: forward, backward, step, save, load.

One engine holds one module and its AdamW. World size 1 needs no launcher, no environment, no compiler and no fixed
port; more ranks are told apart by :func:`init_distributed`. A gradient that is not finite is never stepped.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from sao_core.config import ConfigError
from sao_core.quiet import quiet_libraries

Module = TypeVar("Module", bound=nn.Module)

MAX_SKIPPED_IN_A_ROW = 3
COUNTERS = "counters.json"
_BUCKET_MULTIPLE = 512
_BUCKET_ELEMENTS = 976_562 * _BUCKET_MULTIPLE
"""DeepSpeed allocates a whole bucket at once; half a billion elements are its default for large models."""


class NonFiniteGradients(RuntimeError):
    """Several gradients in a row were not finite; the weights are still those before the first of them."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW: peak learning rate, steps over which it rises from 0, decay, betas, largest gradient norm."""

    lr: float
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0

    def lr_at(self, update: int) -> float:
        """Learning rate of optimizer step ``update``, counted from 0."""
        return self.lr * min(1.0, (update + 1) / self.warmup_steps) if self.warmup_steps else self.lr


@dataclass(frozen=True)
class Step:
    """What an optimizer step did: gradient norm before clipping (None: not finite), and whether it was applied."""

    grad_norm: float | None
    applied: bool


def init_distributed(device: torch.device, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
    """Join the process group that the engines use; a second call does nothing.

    At world size 1 the rendezvous is in memory. With more ranks ``init_method`` is what
    `torch.distributed.init_process_group` takes, e.g. `tcp://host:port`.
    """
    with _quiet():
        import deepspeed
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if device.type == "cpu":
            set_accelerator(CPU_Accelerator())
        # DeepSpeed reads its device from here and from nowhere else.
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        # An empty table of C++ operators: none of those on our path needs one, and probing them runs the compiler.
        deepspeed.ops.__compatible_ops__ = {}
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            if world_size == 1:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            else:
                dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


class Engine(Generic[Module]):
    """A module, its AdamW and their DeepSpeed engine.

    ``module`` must be on the CPU or on ``device`` with the frozen parameters already marked. After this, only the
    engine's own methods may touch its parameters (ZeRO 3 shards them). Raises ConfigError for a precision that the
    ZeRO stage cannot train in.
    """

    def __init__(
        self,
        module: Module,
        settings: OptimizerSettings,
        *,
        zero_stage: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dtype != torch.float32 and zero_stage == 0:
            raise ConfigError(
                f"learner.zero_stage must be 1, 2 or 3 with model.dtype={str(dtype).removeprefix('torch.')}, "
                "which need a float32 copy of the weights: got 0"
            )
        init_distributed(device)
        self.settings = settings
        self.device = device
        self.updates = 0
        """Optimizer steps applied."""
        self.skipped = 0
        """Optimizer steps not applied because the gradient was not finite."""
        self._skipped_in_a_row = 0
        self._fp32_without_zero = zero_stage == 0 and dtype == torch.float32
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        with _quiet():
            import deepspeed

            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                model_parameters=parameters,
                config=_deepspeed_config(settings, zero_stage, dtype, sum(p.numel() for p in parameters)),
            )
        self._engine.train()

    @property
    def module(self) -> Module:
        """The module itself."""
        module: Module = self._engine.module
        return module

    @property
    def rank(self) -> int:
        """This process's place among the ranks."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks that share the work."""
        return dist.get_world_size()

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.settings.lr_at(self.updates)

    def __call__(self, *inputs: Any) -> Any:
        """Forward pass of the module."""
        return self._engine(*inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of one micro-batch's share of the global loss; ``last`` closes the sum.

        ``loss`` already has the global denominator, so shares add up over micro-batches and over ranks (DeepSpeed
        averages over ranks; the factor here undoes it). Every rank must make the same number of calls.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self) -> Step:
        """Clip, step and clear the gradient. One that is not finite is dropped and counted.

        Raises NonFiniteGradients at the third such gradient in a row.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.lr
        norm = self._norm_without_zero() if self._fp32_without_zero else None
        if norm is not None and not math.isfinite(norm):
            self._engine.optimizer.zero_grad()
            applied = False
        else:
            self._engine.step()
            applied = bool(self._engine.was_step_applied())
            norm = float(self._engine.get_global_grad_norm()) if norm is None else norm
        self._count(applied)
        return Step(norm if applied else None, applied)

    def _norm_without_zero(self) -> float:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(gradients))

    def _count(self, applied: bool) -> None:
        if applied:
            self.updates += 1
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteGradients(
                f"{self._skipped_in_a_row} gradients in a row were not finite; none was applied. Lower the learning "
                "rate, or look at the rewards and log-probabilities of the last batches"
            )

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of all weights by parameter name (tied ones once), gathered on every rank."""
        import deepspeed

        state = {}
        for name, parameter in self.module.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter, enabled=self._engine.zero_optimization_stage() == 3):
                state[name] = parameter.detach().clone()
        buffers = {name for name, _ in self.module.named_buffers()}
        return state | {name: tensor for name, tensor in self.module.state_dict().items() if name in buffers}

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and counters below ``folder``; every rank must call it."""
        with _quiet():
            self._engine.save_checkpoint(str(folder), tag="engine")
        if self.rank == 0:
            counters = {"updates": self.updates, "skipped": self.skipped, "sharding": self._sharding()}
            (folder / COUNTERS).write_text(json.dumps(counters))

    def load(self, folder: Path) -> None:
        """Restore what :meth:`save` wrote. Learning rate, decay and betas stay those of this engine's settings.

        Raises ConfigError if another number of ranks or another ZeRO stage wrote it: shards do not fit then.
        """
        counters = json.loads((folder / COUNTERS).read_text())
        written, present = counters["sharding"], self._sharding()
        if written != present:
            raise ConfigError(
                f"the checkpoint in {folder} was written with {written}; resume with the same: got {present}"
            )
        with _quiet():
            loaded, _ = self._engine.load_checkpoint(str(folder), tag="engine")
        if loaded is None:
            raise FileNotFoundError(f"no engine checkpoint in {folder}")
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self._skipped_in_a_row = 0
        for group in self._engine.optimizer.param_groups:
            group.update(betas=self.settings.betas, weight_decay=self.settings.weight_decay)

    def _sharding(self) -> dict[str, int]:
        return {"ranks": self.world_size, "learner.zero_stage": self._engine.zero_optimization_stage()}

    def close(self) -> None:
        """Release hooks and buffers; the module must not be used afterwards."""
        self._engine.destroy()


def _deepspeed_config(
    settings: OptimizerSettings, zero_stage: int, dtype: torch.dtype, num_elements: int
) -> Mapping[str, Any]:
    bucket = min(-(-num_elements // _BUCKET_MULTIPLE) * _BUCKET_MULTIPLE, _BUCKET_ELEMENTS)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": settings.grad_clip,
        "steps_per_print": sys.maxsize,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed logs to standard output, and prints there too."""
    quiet_libraries()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
