"""Launches ``prepare/tile_prune.cu``: prunes 4x4 tiles and compresses W and W^T, without a workspace."""

from __future__ import annotations

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...plan.kernel import Choice
from ...vocab import ElementKind, TileRule
from ..descriptor import TilePruneSparse24Descriptor
from ..kernel import PrepareKernel, element_defines
from ..kernel_table import SQUARE_SIDE

_SOURCE = "prepare/tile_prune.cu"
_THREADS = 256
_RULES = {
    TileRule.GREEDY_MAGNITUDE: {"RULE": 0, "SIGNED": 0},
    TileRule.GREEDY_VALUE: {"RULE": 0, "SIGNED": 1},
    TileRule.CAUSAL_1122: {"RULE": 1, "SIGNED": 1},
    TileRule.OPTIMAL: {"RULE": 2, "SIGNED": 0},
}
_NO_FLOAT = (0, 0, 0)
# The optimal rule computes with values: it needs the mantissa bits, the exponent bias and whether Inf exists.
_FLOATS = {
    ElementKind.F32: (23, 127, 1),
    ElementKind.F16: (10, 15, 1),
    ElementKind.BF16: (7, 127, 1),
    ElementKind.FP8_E4M3: (3, 7, 0),
    ElementKind.FP8_E5M2: (2, 15, 1),
}


@kernel_params("prepare/params/tile_prune.cuh")
class TilePruneParams(KernelParams):
    """Parameters of ``prepare/tile_prune.cu``."""

    dense = field("const u8*", "Dense W[m, k].")
    values = field("u8*", "Kept values of W: [m, k / 2].")
    metadata = field("u16*", "Positions of the kept values of W: [m, k / 8].")
    values_t = field("u8*", "Kept values of W^T: [k, m / 2].")
    metadata_t = field("u16*", "Positions of the kept values of W^T: [k, m / 8].")
    mask = field("uint2*", "Mask of the kept cells: 64 bits for each 8 x 8 tile, [m / 8, k / 8].")
    m = field("i64", "Number of rows.")
    k = field("i64", "Number of columns.")


def defines(desc: TilePruneSparse24Descriptor) -> dict[str, int]:
    float_format = _FLOATS.get(desc.element, _NO_FLOAT) if desc.rule is TileRule.OPTIMAL else _NO_FLOAT
    macros = dict(zip(("MANTISSA_BITS", "EXPONENT_BIAS", "HAS_INF"), float_format, strict=True))
    return {**element_defines(desc.element), **_RULES[desc.rule], **macros}


class Kernel(PrepareKernel[TilePruneSparse24Descriptor]):
    sources = (_SOURCE,)
    parameters = TilePruneParams

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        self.blocks = -(-desc.m // SQUARE_SIDE) * -(-desc.k // SQUARE_SIDE)
        self.sizes = {"m": desc.m, "k": desc.k}
        self.details = f"{desc.rule}, {self.blocks} blocks of {SQUARE_SIDE} x {SQUARE_SIDE} cells"
        self.function = load(_SOURCE, "tile_prune", _THREADS, choice.device, defines(desc))
