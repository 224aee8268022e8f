"""Launches ``gemm/inflate_strict.cu``: canonical weights, one kernel, no workspace."""

from __future__ import annotations

from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Alignment, Views
from ...vocab import DeviceProperties, GemmOp
from ..descriptor import GemmSparse24Descriptor
from ..kernel import (
    SCALES,
    GemmKernel,
    address,
    c_parameters,
    group_parameters,
    product_defines,
    scale_defines,
)
from ..limits import STRICT_SMALL_TILE, most_token_tiles

_SOURCE = "gemm/inflate_strict.cu"
_TILES = {(128, 128): 256, (128, 32): 128, STRICT_SMALL_TILE: 128}
"""Outputs x tokens of each tile and its threads, from the largest tile down, as the kernel numbers them."""


@kernel_params("gemm/params/inflate_strict.cuh")
class StrictParams(KernelParams):
    """Parameters of ``gemm/inflate_strict.cu``."""

    values = field("const void*", "Kept values of W: [m, k / 2].")
    metadata = field("const u16*", "Positions of the kept values: [m, k / 8].")
    x = field("const void*", "X[n, k]; dY[n, m] for dgrad.")
    bias = field("const void*", "Bias of the outputs, or null.")
    y = field("void*", "Y[n, m], or Y[n, m / 2] if the epilogue is gated; dX[n, k] for dgrad.")
    n = field("i64", "Number of tokens.")
    m = field("i64", "Number of rows of W.")
    k = field("i64", "Number of columns of W.")
    x_stride = field("i64", "Elements from one row of x to the next.")
    y_stride = field("i64", "Elements from one row of y to the next.")
    alpha = field("float", "Factor of the product.")
    beta = field("float", "Factor of C.")
    c = field("const void*", "C, which lies as y does, or null.")
    c_stride = field("i64", "Elements from one row of C to the next.")
    group_tokens = field(
        "const int*",
        "Grouped: the groups' offsets [groups + 1] in X and Y, or if group_places > 0 their counts [groups].",
    )
    groups = field("u32", "Grouped: number of groups of tokens. m is that of one group.")
    group_places = field("u32", "Grouped: rows of X and Y that every group has; 0 where offsets are given.")
    scale_x = field("const float*", "Scales of X: [1], or [n] with one for each token.")
    scale_w = field("const float*", "Scales of W: [1], or [m] with one for each row.")
    scale_y = field("const float*", "Scale of fp8 results [1], or null.")
    amax = field("int*", "Bits of the largest magnitude [1] of fp8 results before their scale, or null.")


class Kernel(GemmKernel):
    alignments = {"weight": Alignment(16)}  # noqa: RUF012
    sources = (_SOURCE,)

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc, device = self.descriptor, choice.device
        tile = _tile_for(desc, device)
        self._ctas = _grid_size(desc, tile)
        self.details = f"tile {tile[0]}x{tile[1]}, {self._ctas} CTAs"
        kind = {"DGRAD": int(desc.op is GemmOp.DGRAD), "GROUPED": int(desc.groups > 0)}
        defines = {**product_defines(desc), **scale_defines(desc), **kind, "TILE": list(_TILES).index(tile)}
        self._function = load(_SOURCE, "gemm_strict", _TILES[tile], device, defines)

    def launcher(self, views: Views, workspace: int) -> Launch:
        desc, source, result = self.descriptor, views["source"], views["result"]
        if self._ctas == 0:
            return nothing
        return self._function.bind(
            self._ctas,
            StrictParams(
                values=views["values"].address,
                metadata=views["metadata"].address,
                x=source.address,
                y=result.address,
                n=desc.n,
                m=desc.m,
                k=desc.k,
                x_stride=source.strides[0],
                y_stride=result.strides[0],
                alpha=desc.alpha,
                beta=desc.beta,
                **c_parameters(desc, views),
                **{name: address(views.get(name)) for name in ("bias", *SCALES)},
                **group_parameters(desc, views),
            ),
        )


def _tile_for(desc: GemmSparse24Descriptor, device: DeviceProperties) -> tuple[int, int]:
    """The largest tile that n fills by half and that leaves less than half of the SMs idle.

    The choice may depend on n, because no bit of a result depends on the tile.
    """
    mean = desc.n // max(1, min(desc.groups, desc.n))
    for tile in _TILES:
        if 2 * mean > tile[1] and 2 * _grid_size(desc, tile) >= device.multiprocessors:
            return tile
    return STRICT_SMALL_TILE


def _grid_size(desc: GemmSparse24Descriptor, tile: tuple[int, int]) -> int:
    return -(-desc.sums // tile[0]) * most_token_tiles(desc, tile[1])
