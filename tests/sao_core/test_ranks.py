"""A step does not depend on how many ranks share it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_fixtures import build_model_folder
from rank_main import STAGES, main, one_step


def test_two_ranks_make_the_same_step_as_one(tmp_path: Path) -> None:
    folder = build_model_folder(tmp_path / "policy")
    torch.multiprocessing.spawn(main, (str(tmp_path),), nprocs=2)
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    alone = one_step(folder, 1)
    for stage in STAGES:
        assert results[stage]["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6), stage
        for model in ("policy", "critic"):
            for name, tensor in alone[model].items():
                torch.testing.assert_close(results[stage][model][name], tensor, rtol=1e-4, atol=1e-5)
