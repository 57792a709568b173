"""The states of all random generators of a process, kept without pickle: JSON for numbers, safetensors for tensors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

NUMBERS = "random.json"
TENSORS = "random.safetensors"


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and PyTorch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_random_state(folder: Path) -> None:
    """Write the states of Python's, NumPy's and PyTorch's generators."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [np.asarray(keys).tolist(), position, has_gauss, cached]
    (folder / NUMBERS).write_text(json.dumps({"python": random.getstate(), "numpy": numpy_state}))
    states = {"cpu": torch.get_rng_state()}
    states |= {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    save_file(states, folder / TENSORS)


def load_random_state(folder: Path) -> None:
    """Restore what :func:`save_random_state` wrote; devices that are not there are left out."""
    numbers = json.loads((folder / NUMBERS).read_text())
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    states = load_file(folder / TENSORS)
    torch.set_rng_state(states["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"cuda:{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{i}"], i)
