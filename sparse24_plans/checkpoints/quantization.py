"""Quantized matrices in compressed-tensors' checkpoints: ``float-quantized``, ``int-quantized``.

A matrix ``NAME`` [M, K] of ``F8_E4M3`` or ``I8`` stands for itself times ``NAME_scale``: one number, or one
for each row. The zeros of a 2:4 matrix are stored, unless ``sparse-24-bitmask`` compresses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .._vendor import compressed_tensors
from ..errors import FormatError, UnsupportedError
from ..vocab import ElementKind
from ..weights import canonical
from ..weights.quantize import LARGEST, SCALE_SUFFIX
from .folder import DTYPES, ELEMENTS, ModelReader
from .layers import Layer, dense_blocks
from .safetensors_file import shown

SCALE_DTYPES = tuple(DTYPES[kind] for kind in (ElementKind.F32, ElementKind.F16, ElementKind.BF16))
"""The safetensors types that scales of matrices of 8 bits can have."""
_ZERO_POINT = "_zero_point"
_GROUPS = "config_groups"
_SERVED = (
    ("weights", {("tensor", False), ("channel", False)}),
    ("input_activations", {("tensor", False), ("token", True)}),
)
"""(strategy, dynamic) of the quantization that layers compute."""
UNSERVED_KEYS = ("kv_cache_scheme", "transform_config")
"""Entries of ``quantization_config`` that ask for what no layer computes."""


def quantized_layers(model: ModelReader) -> tuple[list[Layer], dict[str, str]]:
    """The quantized 2:4 matrices with stored zeros, and why other quantized matrices aren't among them."""
    layers: list[Layer] = []
    reasons: dict[str, str] = {}
    for name, info in model.tensors.items():
        element = ELEMENTS.get(info.dtype)
        scale = model.tensors.get(name + SCALE_SUFFIX)
        if scale is None or element not in LARGEST or not name.endswith(compressed_tensors.WEIGHT_SUFFIX):
            continue
        if len(info.shape) != 2 or info.shape[1] % 8:
            reasons[name] = f"expected [M, K] with K a multiple of 8, got {list(info.shape)}"
            continue
        layer = Layer(name, *info.shape, element, (name,))
        if (reason := scale_obstacle(model, name) or _not_sparse(model, layer)) is None:
            layers.append(layer)
        else:
            reasons[name] = reason
    return layers, reasons


def scale_obstacle(model: ModelReader, name: str) -> str | None:
    """Why a matrix isn't its stored values times one scale, or one for each row; None if it is."""
    rows, scale = math.prod(model.tensors[name].shape[:-1]), model.tensors[name + SCALE_SUFFIX]
    if scale.dtype not in SCALE_DTYPES:
        return f"expected scales of {', '.join(SCALE_DTYPES)}, got {shown(scale.dtype)}"
    if (scales := math.prod(scale.shape)) not in (1, rows):
        return f"expected one scale, or one for each row, got {scales}"
    zero_point = name + _ZERO_POINT
    if zero_point in model.tensors and model.read(zero_point).any():
        return "expected zero points of 0, got others"
    return None


def parts_of(name: str) -> tuple[str, ...]:
    """The tensors that belong to a quantized matrix."""
    home = name.removesuffix(compressed_tensors.WEIGHT_SUFFIX)
    return name + SCALE_SUFFIX, name + _ZERO_POINT, f"{home}.input_scale", f"{home}.input_zero_point"


def config_entry(model: ModelReader, layers: Iterable[Layer]) -> dict[str, Any]:
    """compressed-tensors' entry of ``config.json`` for the quantized matrices; empty without any."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for layer in layers:
        scale, _, given, _ = (model.tensors.get(name) for name in parts_of(layer.name))
        if scale is not None and layer.element in LARGEST:
            kind = "int" if layer.element is ElementKind.S8 else "float"
            strategy = "tensor" if math.prod(scale.shape) == 1 else "channel"
            home = layer.name.removesuffix(compressed_tensors.WEIGHT_SUFFIX)
            groups.setdefault((kind, strategy, given is not None), []).append(home)
    if not groups:
        return {}
    entries: dict[str, Any] = {}
    for (kind, strategy, is_static), names in groups.items():
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        inputs = {"strategy": "tensor" if is_static else "token", "dynamic": not is_static}
        entries[f"group_{len(entries)}"] = {
            "targets": sorted(names),
            "weights": {**common, "strategy": strategy, "dynamic": False},
            "input_activations": {**common, **inputs},
        }
    kinds = {kind for kind, _, _ in groups}
    form = f"{kinds.pop()}-quantized" if len(kinds) == 1 else "mixed-precision"
    about = {"quant_method": compressed_tensors.METHOD, "quantization_status": "compressed", "format": form}
    return {compressed_tensors.CONFIG_KEYS[0]: {**about, _GROUPS: entries}}


def _not_sparse(model: ModelReader, layer: Layer) -> str | None:
    try:
        for rows, dense in dense_blocks(model, layer):
            canonical.occupancy_codes(dense.view(np.uint8), layer.element, rows.start)
    except FormatError as error:
        return f"not 2:4 in row {error.row}, group {error.group}"
    return None


def check_groups(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where ``quantization_config`` asks for what no layer of 8 bits computes."""
    groups = config.get(_GROUPS) or {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        types = set()
        for part, served in _SERVED:
            given = group.get(part) if isinstance(group, Mapping) else None
            given = given if isinstance(given, Mapping) else {}
            types.add(str(given.get("type")))
            got = str(given.get("strategy")), bool(given.get("dynamic"))
            if given.get("num_bits") != 8 or not given.get("symmetric", True) or got not in served:
                raise UnsupportedError(
                    f"{_GROUPS}.{name}.{part}: expected symmetric 8 bits, (strategy, dynamic) one of "
                    f"{sorted(served)}, got {dict(given)!r:.160}"
                )
        if len(types) > 1:
            raise UnsupportedError(f"{_GROUPS}.{name}: expected weights and inputs of one type")
        if group.get("output_activations"):
            raise UnsupportedError(f"{_GROUPS}.{name}.output_activations: expected none")


def is_served(section: Any) -> bool:
    """Whether a section of ``config.json`` is compressed-tensors' and asks only for what layers compute."""
    if not isinstance(section, Mapping) or section.get("quant_method") not in (
        None,
        compressed_tensors.METHOD,
    ):
        return False
    try:
        check_groups(section)
    except UnsupportedError:
        return False
    return not any(section.get(key) for key in UNSERVED_KEYS)
