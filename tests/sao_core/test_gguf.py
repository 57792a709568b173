"""A model in a GGUF file becomes an ordinary folder, or one line says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sao_core.config import ConfigError
from sao_core.models.gguf import find_gguf, import_gguf

HIDDEN, LAYERS, HEADS, WORDS = 32, 1, 2, ["<|end|>", "a", "b", "ab"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, its matrices quantised to eight bits."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN, HIDDEN),
        "attn_v": (HIDDEN, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (2 * HIDDEN, HIDDEN),
        "ffn_up": (2 * HIDDEN, HIDDEN),
        "ffn_down": (HIDDEN, 2 * HIDDEN),
    }
    for name, shape in shapes.items():
        weights = gguf.quantize(rng.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.{name}.weight", weights, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", rng.normal(size=(len(WORDS), HIDDEN)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_model_folder(file: Path, tmp_path: Path) -> None:
    import_gguf(find_gguf(str(file)), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.model_type, model.dtype) == ("llama", torch.float32)
    assert model.config.to_dict().get("quantization_config") is None
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template.endswith("<|end|>{% endfor %}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing half-made is left"


def test_a_package_that_ships_a_gguf_file_is_enough(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ships_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('is never imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_gguf("ships_a_model") == package / "model.gguf"
    (package / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds 2 \.gguf files, which must be 1"):
        find_gguf("ships_a_model")


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere.gguf", "no such file: nowhere.gguf"), ("no_such_package", "neither a .gguf file nor an installed")],
)
def test_a_source_that_is_none_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_gguf(source)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match=r"broken\.gguf could not be read"):
        import_gguf(broken, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_existing_folder_is_left_alone(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists: name a folder that does not"):
        import_gguf(file, tmp_path)


def test_missing_packages_name_their_extra(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'sao-pipeline\[gguf\]'"):
        import_gguf(file, tmp_path / "model")
