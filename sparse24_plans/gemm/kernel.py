"""The base class of all gemm backends."""

from __future__ import annotations

import numpy as np

from ..device.jit.enum_codes import ELEMENT_CODES, type_defines
from ..device.jit.structs import KernelParams, field, kernel_params
from ..plan.kernel import Choice, Kernel
from ..plan.operands import Views, leading_dimension
from ..vocab import CANONICAL_LAYOUT, GroupTokens, ScaleKind
from ..weights import packing
from ..weights.packed_layouts import TileLayout, layout_called
from ..weights.packing_quantized import pack_quantized
from ..weights.quantized_weight import Sparse24QuantizedWeight
from ..weights.weight import CanonicalWeight, PackedWeight, Sparse24Weight
from .descriptor import GemmSparse24Descriptor
from .kernel_table import GemmEntry

MAX_STRIDES = 64
"""Number of pairs of strides whose library plans are cached; the least recently used one is dropped first."""


SCALES = {
    "scale_x": field("const float*", "Scales of X: [1], or [n] with one for each token."),
    "scale_w": field("const float*", "Scales of W: [1], or [m] with one for each row."),
    "scale_y": field("const float*", "Scale of fp8 results [1], or null."),
    "amax": field("int*", "Bits of the largest magnitude [1] of fp8 results before their scale, or null."),
}
"""The operands that scale X, W and results, and the results' largest magnitude: parameters of these names."""
GROUPS = {
    "group_tokens": field(
        "const int*",
        "Grouped: the groups' offsets [groups + 1] in X and Y, or if group_places > 0 their counts [groups].",
    ),
    "groups": field("u32", "Grouped: number of groups of tokens. Sizes of W are those of one group."),
    "group_places": field("u32", "Grouped: rows of X and Y that every group has; 0 where offsets are given."),
}
"""The parameters that ``group_parameters`` gives."""
_SCALE_CODES = {ScaleKind.NONE: 0, ScaleKind.TENSOR: 1, ScaleKind.ROW: 2}


@kernel_params("gemm/params/batches.cuh")
class BatchParams(KernelParams):
    """How the operands of batches lie. Zeros where there is one batch."""

    x = field("i64", "Elements from one batch of X to the next; 0 if all batches have the same X.")
    y = field("i64", "Elements from one batch of Y to the next.")
    c = field("i64", "Elements from one batch of C to the next; 0 if all batches have the same C.")
    bias = field("i64", "Elements from one batch of the bias to the next.")
    scale_x = field("i64", "Elements from one batch of the scales of X to the next.")
    scale_w = field("i64", "Elements from one batch of the scales of W to the next.")
    weight_rows = field(
        "i64", "Rows of W from one batch's weight to the next; 0 if all batches have one weight."
    )
    count = field("u32", "Number of batches.")
    work_tiles = field("u32", "Number of work tiles of one batch.")


class GemmKernel(Kernel[GemmSparse24Descriptor]):
    """Operands: ``source``, ``result``, ``bias``, ``scale_x``, ``scale_w``, ``c``, the weight's buffers."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        self.entry: GemmEntry = choice.entry
        if self.descriptor.is_empty:
            self.alignments = {}  # no kernel reads the operands

    def pack(self, weight: CanonicalWeight) -> PackedWeight:
        """``weight`` in the layout that the kernel reads."""
        if self.entry.layout == CANONICAL_LAYOUT:
            return PackedWeight.canonical(weight)
        if isinstance(weight, Sparse24QuantizedWeight):
            return pack_quantized(weight)
        assert isinstance(weight, Sparse24Weight)
        return packing.pack(weight, self.tiles)

    @property
    def tiles(self) -> TileLayout:
        """The layout of the tiles of W that the kernel reads."""
        return layout_called(self.entry.layout, self.descriptor.quantization)


def product_defines(desc: GemmSparse24Descriptor) -> dict[str, int]:
    """The macros of every kernel with an epilogue: its types, C's if there is one, and the bits of bounds."""
    threshold, most = np.array(desc.relu_bounds, np.float32).view(np.uint32)
    return {
        **type_defines(desc),
        "X_ELEMENT": ELEMENT_CODES[desc.x_element],
        "C": ELEMENT_CODES[desc.c_element] + 1 if desc.has_c else 0,
        "RELU_THRESHOLD": int(threshold),
        "RELU_UPPER_BOUND": int(most),
    }


def scale_defines(desc: GemmSparse24Descriptor) -> dict[str, int]:
    """The macros of a kernel that takes scales of X and W."""
    return {"SCALE_X": _SCALE_CODES[desc.scale_x], "SCALE_W": _SCALE_CODES[desc.scale_w]}


def c_parameters(desc: GemmSparse24Descriptor, views: Views) -> dict[str, int]:
    """The parameters ``c`` and ``c_stride`` of a launch; none without C."""
    if "c" not in views:
        return {}
    return {"c": views["c"].address, "c_stride": leading_dimension(views["c"], desc.y_order)}


def group_parameters(desc: GemmSparse24Descriptor, views: Views) -> dict[str, int]:
    """The parameters ``group_tokens``, ``groups`` and ``group_places`` of a launch; none without groups."""
    if not desc.groups:
        return {}
    places = desc.n // desc.groups if desc.group_tokens is GroupTokens.COUNTS else 0
    tokens = views[desc.group_tokens].address
    return {"group_tokens": tokens, "groups": desc.groups, "group_places": places}


def batch_parameters(desc: GemmSparse24Descriptor, views: Views, work_tiles: int) -> BatchParams:
    """The parameters ``batches`` of a launch with ``work_tiles`` work tiles for each batch."""
    if not desc.is_batched:
        return BatchParams()
    names = {"source": "x", "result": "y", **{name: name for name in ("c", "bias", "scale_x", "scale_w")}}
    strides = {field: views[name].strides[0] for name, field in names.items() if name in views}
    rows = 0 if desc.shared_weight else desc.m
    return BatchParams(count=desc.batch_count, work_tiles=work_tiles, weight_rows=rows, **strides)
