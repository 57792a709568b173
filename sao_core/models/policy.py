"""The policy on disk: an ordinary Hugging Face folder (config, tokenizer, chat template, safetensors).

Loads, saves, and swaps weights in place. Every folder written here loads with `AutoModelForCausalLM` as well as with
:func:`load_weights`. Never downloads, never runs code from a folder, never reads a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from sao_core.config import ConfigError
from sao_core.quiet import quiet_libraries

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def resolve_device(name: str) -> torch.device:
    """`auto` → the accelerator if there is one, else the CPU; other names as PyTorch reads them.

    Raises ConfigError for a device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be `auto`, `cpu`, `cuda` or `cuda:N`: got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there: {torch.cuda.device_count()} CUDA devices; set it to `auto`")
    return device


def load_policy(
    folder: Path | str, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Load a causal LM from a local folder, in evaluation mode.

    ``dtype`` is a torch dtype or its name. Raises ConfigError if the folder is no model, its architecture no
    causal LM, or its files do not hold all of its weights.
    """
    return _load(AutoModelForCausalLM, folder, dtype, device)


def load_backbone(
    folder: Path | str, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Load a folder that holds a causal LM without its language-model head. Raises like :func:`load_policy`."""
    return _load(AutoModel, folder, dtype, device)


def _load(kind: Any, folder: Path | str, dtype: str | torch.dtype, device: str | torch.device) -> PreTrainedModel:
    folder = _model_folder(folder)
    quiet_libraries()
    try:
        model, report = kind.from_pretrained(
            folder, dtype=_dtype(dtype), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model folder {folder} could not be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:
        raise ConfigError(
            f"model folder {folder} lacks {len(report['missing_keys'])} weights, first {min(report['missing_keys'])}"
        )
    device = resolve_device(device) if isinstance(device, str) else device
    use_fast_experts(model, device)
    return model.to(device).eval()


def use_fast_experts(model: PreTrainedModel, device: torch.device) -> None:
    """On a CPU the loop over experts trains fastest; elsewhere Transformers' own choice stands."""
    if device.type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. Raises ConfigError if it is missing or has no chat template."""
    folder = _model_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {folder} has no usable tokenizer: {_first_line(error)}") from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {folder} has no chat template: put one into chat_template.jinja beside it, "
            "or take the instruction-tuned variant of the model"
        )
    return tokenizer


def save_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write model, generation config, tokenizer and chat template as a Hugging Face folder.

    ``state_dict`` replaces the model's own weights (by its parameter names): a sharded model's gathered ones. Weights
    are written under the names that the architecture publishes (one tensor per expert), which other engines read too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    model.save_pretrained(folder, state_dict=dict(state_dict) if state_dict is not None else None)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path | str) -> None:
    """Copy a folder's weights into ``model`` in place: parameters keep their storage, device and dtype.

    Takes milliseconds where :func:`load_policy` rebuilds a model. Raises ConfigError if the folder's weights do not
    cover the model's; the model is then unchanged.
    """
    folder = Path(folder)
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    copies: list[tuple[Tensor, Tensor]] = []
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                view = _view(targets, key)
                if view is None:
                    return _load_by_rebuilding(model, folder)
                copies.append((view, tensors.get_tensor(key)))
    covered = sum({_where(view): view.numel() for view, _ in copies}.values())
    if covered != sum(parameter.numel() for parameter in model.parameters()) + _persistent(model):
        return _load_by_rebuilding(model, folder)
    for view, tensor in copies:
        if view.shape != tensor.shape:
            raise ConfigError(f"weights in {folder} do not fit: {tuple(tensor.shape)} for {tuple(view.shape)}")
    for view, tensor in copies:
        view.copy_(tensor)
    return None


def _view(targets: Mapping[str, Tensor], key: str) -> Tensor | None:
    """The part of the model that a stored tensor fills: a parameter, or one expert of a fused one."""
    if key in targets:
        return targets[key]
    match = _EXPERT.fullmatch(key)
    if match is None:
        return None
    experts, index, projection = match.groups()
    fused = targets.get(f"{experts}.down_proj" if projection == "down" else f"{experts}.gate_up_proj")
    if fused is None or int(index) >= fused.shape[0]:
        return None
    if projection == "down":
        return fused[int(index)]
    gate, up = fused[int(index)].chunk(2)
    return gate if projection == "gate" else up


def _where(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _persistent(model: PreTrainedModel) -> int:
    """Elements of the buffers that a state dict holds."""
    buffers = dict(model.named_buffers())
    return sum(buffers[name].numel() for name in model.state_dict(keep_vars=True).keys() & buffers.keys())


def _load_by_rebuilding(model: PreTrainedModel, folder: Path) -> None:
    """The slow way, for names that only Transformers' own converters know."""
    source = load_policy(folder, model.dtype, "cpu").state_dict()
    target = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in target.items()}
    if shapes != {name: tensor.shape for name, tensor in source.items()}:
        raise ConfigError(f"weights in {folder} are of another architecture than the running model")
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} has no model.safetensors")
    return files


def _model_folder(folder: Path | str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist; give a local Hugging Face folder, or `tiny`")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config.json of {folder} could not be read: {_first_line(error)}") from error
    known = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type), MODEL_MAPPING_NAMES.get(config.model_type)}
    named = (config.architectures or [config.model_type])[0]
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or named not in known:
        raise ConfigError(f"{folder} holds no causal LM but {named}; give the folder of a decoder-only model")
    return folder


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigError(f"dtype must name a floating-point type such as float32 or bfloat16: got {dtype!r}")
    return resolved


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
