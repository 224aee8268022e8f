"""Launches ``prepare/quantize.cu``: quantizes the rows of a matrix to 8 bits, without a workspace."""

from __future__ import annotations

from ...device.jit.enum_codes import ELEMENT_CODES
from ...device.jit.launcher import load
from ...device.jit.structs import KernelParams, field, kernel_params
from ...device.streams import Launch
from ...plan.kernel import Choice, nothing
from ...plan.operands import Alignment, Views, leading_dimension
from ...vocab import MatrixOrder
from ..descriptor import QuantizeSparse24Descriptor
from ..kernel import PrepareKernel
from ..kernel_table import QUANTIZE_THREADS, threads_of_row

_SOURCE = "prepare/quantize.cu"
_VECTOR_BYTES = 16
_MAX_HELD = 8
"""Most vectors of a row that a thread holds in registers."""


@kernel_params("prepare/params/quantize.cuh")
class QuantizeParams(KernelParams):
    """Parameters of ``prepare/quantize.cu``."""

    x = field("const void*", "Matrix [m, k] to quantize.")
    quantized = field("void*", "Quantized matrix [m, k].")
    scale = field("float*", "Scales of the rows [m], written; or the scale of all, read.")
    m = field("i64", "Number of rows.")
    k = field("i64", "Number of columns.")
    x_stride = field("i64", "Elements from one row of x to the next.")
    quantized_stride = field("i64", "Elements from one row of the quantized matrix to the next.")


def held_vectors(desc: QuantizeSparse24Descriptor) -> int:
    """Vectors of a row that a thread holds: 1, 2, 4 or 8."""
    step = threads_of_row(desc) * _VECTOR_BYTES // desc.element.itemsize
    needed = max(-(-desc.k // step), 1)
    return min(1 << (needed - 1).bit_length(), _MAX_HELD)


def defines(desc: QuantizeSparse24Descriptor) -> dict[str, int]:
    """Macros of the kernel for one descriptor."""
    return {
        "ELEMENT": ELEMENT_CODES[desc.element],
        "OUT": ELEMENT_CODES[desc.out_element],
        "STATIC": int(desc.static_scale),
        "ROW_THREADS": threads_of_row(desc),
        "HELD": held_vectors(desc),
    }


class Kernel(PrepareKernel[QuantizeSparse24Descriptor]):
    sources = (_SOURCE,)
    parameters = QuantizeParams
    default_alignment = Alignment()

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice)
        desc = self.descriptor
        self.blocks = -(-desc.m * threads_of_row(desc) // QUANTIZE_THREADS)
        self.details = f"{threads_of_row(desc)} threads a row, {self.blocks} blocks"
        self.function = load(_SOURCE, "quantize", QUANTIZE_THREADS, choice.device, defines(desc))

    def launcher(self, views: Views, workspace: int) -> Launch:
        if not self.blocks:
            return nothing
        strides = {
            f"{name}_stride": leading_dimension(views[name], MatrixOrder.ROW) for name in ("x", "quantized")
        }
        at = {name: view.address for name, view in views.items()}
        desc = self.descriptor
        parameters = QuantizeParams(**at, m=desc.m, k=desc.k, **strides)
        return self.function.bind(self.blocks, parameters, overlapping=True)
