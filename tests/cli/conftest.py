"""A dense checkpoint, and the file that ``sparse24 compress`` makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import sparse24_plans

from .commands import run

BF16 = sparse24_plans.ElementKind.BF16.dtype


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "dense.safetensors"
    arrays = {
        "layer.0.weight": rng.standard_normal((24, 32), np.float32),
        "layer.1.weight": rng.standard_normal((16, 24), np.float32).astype(BF16),
        "embed.weight": rng.standard_normal((40, 32), np.float32),
        "norm": rng.standard_normal(24, np.float32),
    }
    safetensors.numpy.save_file(arrays, path)
    return path


@pytest.fixture
def compressed(checkpoint: Path) -> Path:
    out = checkpoint.with_name("sparse.safetensors")
    run("compress", checkpoint, "-o", out)
    return out
