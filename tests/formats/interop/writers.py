"""Other people's code that writes foreign formats: the independent side of the tests. Needs PyTorch.

``python -m tests.interop.writers`` writes the fixtures that stand beside this file, with PyTorch's CPU
conversions and compressed-tensors 0.10.2 (and what that imports: transformers).
``python -m tests.interop.writers gpu`` writes those of the GPU. The versions are in the files' metadata.
Fixtures are safetensors files; a tensor is named CASE.PART, and CASE.dense is what the writer was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
ELEMENTS = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "s8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
Parts = dict[str, torch.Tensor]


# Matrices to write --------------------------------------------------------------------------------


def sparse(
    m: int, k: int, element: str, *, group: int = 4, seed: int = 0, full: bool = False
) -> torch.Tensor:
    """Random [m, k] with half of each group non-zero; less than half in about a third, unless ``full``."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(m, k // group, group, generator=generator).argsort(dim=-1)
    few = torch.ones(m, k // group, 1) if full else torch.rand(m, k // group, 1, generator=generator)
    kept = rank < torch.where(few < 0.1, 0, torch.where(few < 0.3, group // 4, group // 2))
    values = torch.randn(m, k // group, group, generator=generator)
    values = values + values.sign() / 4  # none becomes zero in fp8
    if element == "f32":  # PyTorch's reader moves halves as float16, which quiets those that look like a NaN
        values = values.bfloat16().float()
    if element == "s8":
        values = (values * 40).clamp(-127, 127).round()
        values = torch.where(values == 0, 1.0, values)
    return torch.where(kept, values, 0.0).reshape(m, k).to(ELEMENTS[element])


def with_specials(dense: torch.Tensor) -> torch.Tensor:
    """The matrix with NaN, infinities and negative zeros among its non-zeros, if the type has them."""
    specials = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]).to(dense.dtype)
    flat = dense.reshape(-1).clone()
    at = (flat.float() != 0).nonzero().reshape(-1)[::5]
    if dense.is_floating_point():
        flat[at] = specials[torch.arange(len(at)) % 4]
    return flat.reshape(dense.shape)


def transposable(m: int, k: int, element: str, seed: int = 0) -> torch.Tensor:
    """Random [m, k] without zeros, for the tile packer to prune."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator).to(ELEMENTS[element])


# Writers ------------------------------------------------------------------------------------------


def torch_cutlass(dense: torch.Tensor) -> Parts:
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    return {"packed": packed, "meta": meta}


def torch_cutlass_to_dense(parts: Parts) -> torch.Tensor:
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_to_dense_cutlass

    dense: torch.Tensor = sparse_semi_structured_to_dense_cutlass(parts["packed"], parts["meta"])
    return dense


def _bitmask_compressor() -> Any:
    from compressed_tensors.compressors.sparse_compressors import Sparse24BitMaskCompressor
    from compressed_tensors.config import Sparse24BitMaskConfig

    return Sparse24BitMaskCompressor(config=Sparse24BitMaskConfig())


def compressed_tensors_model(state: Parts, targets: set[str]) -> Parts:
    """A model's state with the layers ``targets`` (names without .weight) compressed."""
    model: Parts = _bitmask_compressor().compress(dict(state), compression_targets=targets)
    return model


def compressed_tensors_to_dense(path: Path) -> Parts:
    """Return the dense tensors that compressed-tensors reads from a model's file or folder."""
    return dict(_bitmask_compressor().decompress(str(path)))


def quantized(
    m: int, k: int, bits: int, group: int, *, shift: int = 0, full: bool = False, seed: int = 0
) -> Parts:
    """A 2:4 matrix [m, k] of f16, with its integers, scales and zero points; group 0 is the whole row.

    The matrix is the integers times their scales, so that quantizing gives them again. Zero points are from
    -shift to shift. ``full``: no group of four has fewer than two values.
    """
    generator = torch.Generator().manual_seed(seed)
    groups, most = k // (group or k), (1 << bits - 1) - 1 - shift
    scales = torch.randint(1, 200, (m, groups), generator=generator).half() / 1024
    zeros = torch.randint(-shift, shift + 1, (m, groups), generator=generator).to(torch.int8)
    integers = torch.randint(1, most + 1, (m, k), generator=generator)
    integers *= 2 * torch.randint(0, 2, (m, k), generator=generator) - 1
    integers = torch.where(sparse(m, k, "f16", full=full, seed=seed) == 0, 0, integers).to(torch.int8)
    dense = integers * scales.float().repeat_interleave(k // groups, dim=1)
    return {"dense": dense.half(), "integers": integers, "scales": scales, "zeros": zeros}


def marlin_24(given: Parts, bits: int, group: int) -> Parts:
    """The parts of compressed-tensors' marlin-24."""
    compressor, scheme = _quantizer("marlin-24", bits, group)
    state = {"a.weight": given["dense"], "a.weight_scale": given["scales"]}
    found = compressor.compress(state, {"a": scheme})
    return {name.removeprefix("a."): part for name, part in found.items()}


def pack_quantized(given: Parts, bits: int, group: int, *, symmetric: bool = True) -> Parts:
    """The parts of compressed-tensors' pack-quantized."""
    compressor, scheme = _quantizer("pack-quantized", bits, group, symmetric=symmetric)
    found = compressor.compress_weight(
        given["dense"].float(), given["scales"].float(), scheme.weights, given["zeros"]
    )
    return {**found, "weight_scale": given["scales"]}


def _quantizer(name: str, bits: int, group: int, *, symmetric: bool = True) -> Any:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return BaseCompressor.load_from_registry(name), scheme


def torch_tile(dense: torch.Tensor, use_cutlass: bool = True) -> Parts:
    names = ("packed", "meta", "packed_t", "meta_t", "bitmask")
    parts = torch._sparse_semi_structured_tile(dense, "", use_cutlass)
    return dict(zip(names, parts, strict=True))


def cusparselt(dense: torch.Tensor) -> Parts:
    return {"packed": torch._cslt_compress(dense)}


def cusparselt_metadata(dense: torch.Tensor) -> Parts:
    """The codes of [m, k] with two non-zeros in every group, and the bytes that follow the blob's values."""
    m, k = dense.shape
    kept = dense.float().reshape(m, k // 4, 4) != 0
    positions = kept.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    codes = (positions[..., 0] | positions[..., 1] << 2).to(torch.uint8)
    blob = cusparselt(dense.cuda())["packed"].reshape(-1).view(torch.uint8)
    return {"codes": codes, "meta": blob[m * k // 2 * dense.itemsize :]}


# Fixtures -----------------------------------------------------------------------------------------


def _save(name: str, tensors: Parts, **versions: str) -> None:
    from safetensors.torch import save_file

    stored = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    save_file(stored, FOLDER / f"{name}.safetensors", {"torch": torch.__version__, **versions})


def _cases(write: Callable[[torch.Tensor], Parts], inputs: Parts) -> Parts:
    return {
        f"{case}.{part}": tensor
        for case, dense in inputs.items()
        for part, tensor in {"dense": dense, **write(dense)}.items()
    }


def _write_cpu() -> None:
    import compressed_tensors

    shapes = {"f32": (32, 32, 2), "f16": (64, 64, 4), "bf16": (32, 96, 4), "s8": (32, 128, 4)}
    inputs = {
        element: with_specials(sparse(m, k, element, group=group))
        for element, (m, k, group) in shapes.items()
    }
    inputs["full"] = sparse(32, 64, "bf16", full=True)
    _save("torch_cutlass", _cases(torch_cutlass, inputs))
    state = {
        f"model.layers.{i}.{element}_proj.weight": with_specials(sparse(16, 32, element, seed=i))
        for i, element in enumerate(("bf16", "f16", "f32", "fp8_e4m3", "s8"))
    }
    others = {
        "model.embed_tokens.weight": torch.randn(24, 8).bfloat16(),
        "model.norm.weight": torch.ones(8),
        "model.layers.3.fp8_e4m3_proj.weight_scale": torch.ones(16, 1),
    }
    targets = {name.removesuffix(".weight") for name in state}
    model = compressed_tensors_model({**state, **others}, targets)
    version = compressed_tensors.__version__
    _save("compressed_tensors", model, compressed_tensors=version, format="pt")
    _save("compressed_tensors_dense", {**state, **others}, compressed_tensors=version, format="pt")
    _save("compressed_tensors_quantized", _quantized_cases(), compressed_tensors=version)


def _quantized_cases() -> Parts:
    """Cases FORMAT_BITS_GROUP: the format's parts, and the integers that they hold.

    ``marlin_24_4_128`` has two values in every group of four; ``shifted_4_32`` has zero points.
    """
    found: Parts = {}
    for name, shape, bits, group, more in (
        ("marlin_24", (64, 384), 4, 128, {"full": True}),
        ("marlin_24", (64, 96), 8, 0, {}),
        ("pack_quantized", (16, 72), 4, 0, {}),
        ("pack_quantized", (16, 64), 8, 32, {}),
        ("shifted", (16, 64), 4, 32, {"shift": 3}),
    ):
        given = quantized(*shape, bits, group, **more)
        if name == "marlin_24":
            parts = marlin_24(given, bits, group)
        else:
            parts = pack_quantized(given, bits, group, symmetric=name == "pack_quantized")
        parts["integers"] = given["integers"]
        found |= {f"{name}_{bits}_{group}.{part}": tensor for part, tensor in parts.items()}
    return found


def _write_gpu() -> None:
    about = {"gpu": torch.cuda.get_device_name(), "cusparselt": str(torch.backends.cusparselt.version())}
    tiles = {
        "wide": transposable(32, 128, "f16").cuda(),
        "padded": transposable(40, 64, "bf16").cuda(),
    }
    _save("torch_tile", _cases(torch_tile, tiles), **about)
    blob = torch_tile(transposable(128, 128, "bf16").cuda(), use_cutlass=False)
    kept = ("packed", "packed_t", "bitmask")
    _save("cusparselt_sm80", {f"bf16.{part}": blob[part] for part in kept}, **about)
    orders = {}
    for element, shapes in _SM90_SHAPES.items():
        for m, k in shapes:
            for part, tensor in cusparselt_metadata(sparse(m, k, element, full=True)).items():
                orders[f"{element}_{m}_{k}.{part}"] = tensor
    _save("cusparselt_sm90", orders, **about)


_SM90_SHAPES = {
    "bf16": ((64, 32), (32, 64), (192, 320)),
    "f16": ((128, 128),),
    "s8": ((32, 64), (192, 320)),
    "fp8_e4m3": ((128, 128),),
}


if __name__ == "__main__":
    torch.manual_seed(0)
    _write_gpu() if sys.argv[1:] == ["gpu"] else _write_cpu()
