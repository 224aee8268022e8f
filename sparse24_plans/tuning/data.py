"""Random problems on the current device, for the search for configurations and for the benchmarks."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, cached_property
from typing import Any

import numpy as np

from ..device.install import import_cupy
from ..device.tensors import TensorView
from ..gemm.args import GemmSparse24Args
from ..gemm.descriptor import GemmSparse24Descriptor
from ..gemm.plan import GemmSparse24Plan
from ..vocab import FP8, ElementKind, MatrixOrder
from ..weights.packed_layouts import Quantization, memory_element, stored_width
from ..weights.quantized_weight import Sparse24QuantizedWeight, signed_nibbles
from ..weights.weight import CanonicalWeight, PackedWeight, Sparse24Weight
from .timing import copies_beyond_l2

Array = Any
_ODD = 0x9E3779B97F4A7C15
# SplitMix64 of the seed and the index: cuRAND, which CuPy's own generators need, may not be installed.
_MIX = f"""
unsigned long long z = seed + (unsigned long long)(i + 1) * {_ODD:#x}ull;
z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
z ^= z >> 31;
"""
# Box and Muller's transformation of the upper and the lower 24 bits.
_TO_NORMAL = """
float u = ((float)(z >> 40) + 0.5f) * 5.9604644775390625e-8f;
float v = (float)(z & 0xFFFFFF) * 1.1920928955078125e-7f;
value = sqrtf(-2.0f * logf(u)) * cospif(v);
"""


@cache
def _generator(of_floats: bool) -> Any:
    """Fills an array from a seed: normal float32, or uniform bytes."""
    kernel = import_cupy().ElementwiseKernel
    if of_floats:
        return kernel("uint64 seed", "float32 value", _MIX + _TO_NORMAL, "sparse24_normal")
    return kernel("uint64 seed", "uint8 value", _MIX + "value = (unsigned char)(z >> 56);", "sparse24_bytes")


def random_bits(shape: tuple[int, int], element: ElementKind, seed: int) -> Array:
    """Normal random elements (s8: uniform ones) as raw bits.

    Weights have seeds from 0 on, and all else has negative ones: an X with the numbers of W would make sums
    of squares, whose error in fp8 is far above that of independent numbers.
    """
    cupy, start = import_cupy(), np.uint64((seed + 1) * _ODD**2 % 2**64)
    if element in (ElementKind.S8, ElementKind.U8):
        return _generator(False)(start, cupy.empty(shape, np.uint8))
    values = _generator(True)(start, cupy.empty(shape, np.float32))
    if element in FP8:
        finite = int(np.isfinite(np.arange(128, dtype=np.uint8).view(element.dtype).astype(np.float32)).sum())
        codes = np.arange(finite, dtype=np.uint8).view(element.dtype).astype(np.float32)
        between = cupy.asarray((codes[1:] + codes[:-1]) / 2)
        found = cupy.searchsorted(between, cupy.abs(values).ravel()).reshape(shape).astype(np.uint8)
        return found | (values < 0).astype(np.uint8) << 7
    return _rounded(values, element)


def _rounded(values: Array, element: ElementKind) -> Array:
    """Float32 values as bits of f32, f16 or bf16."""
    if element is ElementKind.F32:
        return values.view(np.uint32)
    if element is ElementKind.F16:
        return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)  # round to nearest even


def widened(bits: Array, element: ElementKind, dtype: type = np.float64) -> Array:
    """Raw bits as float64 (or float32) numbers."""
    cupy = import_cupy()
    if element is ElementKind.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
    if element.itemsize == 1:
        numbers: Array = np.arange(256, dtype=np.uint8).view(element.dtype).astype(dtype)
        return cupy.asarray(numbers)[bits]
    return bits.view(element.dtype).astype(dtype)


def typed(bits: Array, element: ElementKind) -> TensorView:
    """A view of raw bits as elements."""
    return TensorView.of(bits, element=element)


def free_memory() -> None:
    """Give what CuPy keeps for later back to the device."""
    import_cupy().get_default_memory_pool().free_all_blocks()


class Matrix:
    """A random 2:4 weight, dense and packed, in copies that together exceed twice the L2 cache."""

    def __init__(self, m: int, k: int, element: ElementKind, by: Quantization | None = None) -> None:
        self.m, self.k, self.element, self.quantization = m, k, element, by
        whole = Sparse24Weight.prune_compress(typed(random_bits((m, k), element, m + k), element))
        self.weight: CanonicalWeight = whole
        if by is not None:
            self.weight, whole = random_quantized(whole, by)
        self._whole = whole
        self._packed: dict[str, list[PackedWeight]] = {}

    def __repr__(self) -> str:
        return f"{self.quantization or self.element}[{self.m}, {self.k}]"

    def descriptor(self, n: int) -> GemmSparse24Descriptor:
        """The product with n tokens."""
        by = self.quantization
        stored = {} if by is None else {f"weight_{name}": value for name, value in by._asdict().items()}
        return GemmSparse24Descriptor(n=n, m=self.m, k=self.k, element=self.element, **stored)

    @cached_property
    def dense(self) -> list[Array]:
        """Copies of the bits."""
        first = typed(self._whole.decompress(), self.element).bits()
        return [first] + [first.copy() for _ in range(copies_beyond_l2(first.nbytes) - 1)]

    def packed(self, plan: GemmSparse24Plan) -> list[PackedWeight]:
        """Copies in the plan's layout, made once for all n; as many in every layout."""
        layout = plan.sku.layout
        if layout not in self._packed:
            first = plan.pack(self.weight)
            count = copies_beyond_l2(first.nbytes)
            self._packed[layout] = [first] + [deepcopy(first) for _ in range(count - 1)]
        return self._packed[layout]


def random_quantized(
    weight: Sparse24Weight, by: Quantization
) -> tuple[Sparse24QuantizedWeight, Sparse24Weight]:
    """Random stored values and scales at the positions of ``weight``, and the weight that they stand for."""
    cupy, (m, k) = import_cupy(), (weight.m, weight.k)
    element = memory_element(by.element)
    values = random_bits((m, stored_width(k, by)), element, m + k + 1)
    scales = random_bits((m, by.scales_of_a_row(k)), by.scale_element, m + k + 2)
    wide = (
        signed_nibbles(values).astype(np.float32)
        if by.element is ElementKind.S4
        else widened(values, by.element, np.float32)
    )
    each = by.group // 2 if by.group else k // 2
    factors = cupy.repeat(widened(scales, by.scale_element, np.float32), each, axis=1)
    kept = typed(_rounded(wide * factors[:, : k // 2], weight.element), weight.element)
    metadata = weight.metadata_view
    quantized = Sparse24QuantizedWeight(
        typed(values, element),
        metadata,
        typed(scales, by.scale_element),
        element=weight.element,
        validate=False,
        **by.arguments,
    )
    return quantized, Sparse24Weight(kept, metadata, validate=False)


class Problem:
    """One descriptor without bias or scales, its operands, and scratch."""

    def __init__(self, desc: GemmSparse24Descriptor, matrix: Matrix) -> None:
        self.desc, self.matrix = desc, matrix
        self.x = _ordered((desc.n, desc.k), desc.element, desc.x_order)
        self.x[...] = random_bits((desc.n, desc.k), desc.element, seed=~desc.n)
        self.y = _ordered((desc.n, desc.outputs), desc.out_element, desc.y_order)
        self._space = import_cupy().empty(1, np.uint8)

    def workspace(self, plan: GemmSparse24Plan) -> Array:
        """Scratch that all plans of the problem share."""
        if plan.workspace_size() > self._space.size:
            self._space = import_cupy().empty(plan.workspace_size(), np.uint8)
        return self._space

    def arguments(self, packed: PackedWeight, y: Array | None = None) -> GemmSparse24Args:
        result = self.y if y is None else y
        return GemmSparse24Args(
            packed, typed(self.x, self.desc.element), typed(result, self.desc.out_element)
        )

    def poison(self) -> None:
        """Fill result and scratch with what no right result is: NaN in every float."""
        self.y.fill(np.iinfo(self.y.dtype).max)
        self._space.fill(0xFF)


def _ordered(shape: tuple[int, int], element: ElementKind, order: MatrixOrder) -> Array:
    layout = "F" if order is MatrixOrder.COLUMN else "C"
    return import_cupy().empty(shape, element.bits_dtype, order=layout)


def digest(bits: Array) -> int:
    """A position-dependent checksum, made on the device."""
    flat = bits.ravel()
    cupy = import_cupy()
    total, step = 0, 1 << 26
    for start in range(0, flat.size, step):
        part = flat[start : start + step].astype(np.uint64)
        weights = (cupy.arange(part.size, dtype=np.uint64) + np.uint64(start)) * np.uint64(_ODD)
        total = (total + int(((part + np.uint64(1)) * (weights | np.uint64(1))).sum())) % 2**64
    return total
