"""What a model folder must hold, checked from its files alone before anything starts; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from sao_core.config import ConfigError

CRITIC_FOLDER = "critic"
"""Where an exported policy keeps its critic."""


def check_model_folder(path: str) -> None:
    """Raise :class:`ConfigError` unless ``path`` is ``tiny`` or a local causal LM with a chat template."""
    if path == "tiny":
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.path is not a folder: {path!r}; give a local Hugging Face model folder, or `tiny` "
            f"(weights are never downloaded; `sao import-gguf` makes a folder of a GGUF file)"
        )
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"model.path has no config.json: {path!r}; give a folder that `save_pretrained` wrote")
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path has no *.safetensors weights: {path!r}; save the model with `save_pretrained`")
    architectures = _json(config).get("architectures")
    architectures = architectures if isinstance(architectures, list) else []
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        found = ", ".join(map(str, architectures)) or "no architecture"
        raise ConfigError(f"model.path must be a causal language model: {path!r} holds {found}")
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        raise ConfigError(
            f"model.path has no tokenizer (tokenizer_config.json): {path!r}; save the tokenizer beside the model"
        )
    if not (folder / "chat_template.jinja").is_file() and not _json(tokenizer).get("chat_template"):
        raise ConfigError(
            f"the tokenizer in model.path has no chat template: {path!r}; set tokenizer.chat_template and save it, "
            f"or take an instruction-tuned model"
        )


def check_classifier_folder(path: str) -> int:
    """The number of labels of the sequence classifier in the local folder ``path``; raises :class:`ConfigError`."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"the classifier is not a folder: {path!r}; give a local one (weights are never downloaded)")
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"the classifier has no config.json: {path!r}; give a folder that `save_pretrained` wrote")
    values = _json(config)
    architectures = values.get("architectures")
    architectures = architectures if isinstance(architectures, list) else []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        found = ", ".join(map(str, architectures)) or "no architecture"
        raise ConfigError(f"the classifier must be a model for sequence classification: {path!r} holds {found}")
    for pattern, what in (("*.safetensors", "weights"), ("tokenizer_config.json", "tokenizer")):
        if not list(folder.glob(pattern)):
            raise ConfigError(f"the classifier has no {what} ({pattern}): {path!r}; save it with `save_pretrained`")
    labels = values.get("id2label")
    return len(labels) if isinstance(labels, dict) else 2


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error})") from None
    return value if isinstance(value, dict) else {}
