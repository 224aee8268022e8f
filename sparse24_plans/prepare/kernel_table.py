"""The kernel table of plans that prepare weights. Entries that quantize round; the others move bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..plan.guarantee import PrecisionGuarantee
from ..plan.kernel_table import KernelEntry, grid_limit_refusal
from ..vocab import FP8, ElementKind, MathPrecision, PrepareOp, Tier
from ..weights import inflate
from .descriptor import ELEMENTS, SCORE_ELEMENTS, PrepareDescriptor

PACKED_ELEMENTS = (ElementKind.F32, ElementKind.F16, ElementKind.BF16, ElementKind.S8, *FP8)
"""Elements that weights/packing.py has a layout for."""
BLOCK_BYTES = 16384
"""Dense bytes that a CTA of prune.cu processes."""
SQUARE_SIDE = 128
"""Rows, and columns, that a CTA of tile_prune.cu processes."""
QUANTIZE_THREADS = 256
"""Threads of a CTA of quantize.cu."""
_ROW_BYTES_OF_A_THREAD = 128
"""Most bytes of a row that a thread of one warp holds in registers."""
_TILE_SIDES = (64, 128)
"""Fewest rows and columns that a CTA of pack.cu moves."""


def guarantee(descriptor: PrepareDescriptor) -> PrecisionGuarantee:
    """Guarantee of every entry: bits are compared and moved, so nothing rounds, and host and GPU agree."""
    return PrecisionGuarantee(
        math_precision=MathPrecision.of(descriptor.element),
        accumulator=descriptor.element,
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        bit_stable_across_hardware=True,
        subnormals="preserved",
        nonfinite="skips_pruned",
        unit_roundoff=0.0,
        terms_per_k=1.0,
    )


def quantizing(descriptor: PrepareDescriptor) -> PrecisionGuarantee:
    """Guarantee of entries that quantize, or dequantize: results are rounded in float32, alike everywhere.

    A scale and a quotient are rounded, or a product and its element.
    """
    f32 = ElementKind.F32
    more = {"math_precision": MathPrecision.F32, "accumulator": f32, "nonfinite": "propagates"}
    rounding = {"unit_roundoff": f32.unit_roundoff, "terms_per_k": 2.0}
    return guarantee(descriptor).model_copy(update={**more, **rounding})


@dataclass(frozen=True)
class PrepareEntry(KernelEntry):
    """A kernel entry of the family. ``out_element`` is the one that it quantizes to; None: any."""

    guarantee: Callable[[PrepareDescriptor], PrecisionGuarantee] = guarantee
    elements: tuple[ElementKind, ...] = ELEMENTS
    ops: tuple[PrepareOp, ...] = ()
    out_element: ElementKind | None = None

    def refusal(self, descriptor: PrepareDescriptor) -> str | None:
        if descriptor.op not in self.ops:
            return f"does not serve op {descriptor.op}"
        wanted = getattr(descriptor, "out_element", None)
        return (
            None if self.out_element in (None, wanted) else f"quantizes to {self.out_element}, not {wanted}"
        )


def _flat_limits(block_bytes: int, descriptor: PrepareDescriptor) -> str | None:
    return grid_limit_refusal(-(-descriptor.m * descriptor.k * descriptor.element.itemsize // block_bytes))


def _pack_limits(descriptor: PrepareDescriptor) -> str | None:
    return grid_limit_refusal(-(-descriptor.m // _TILE_SIDES[0]) * -(-descriptor.k // _TILE_SIDES[1]))


def _square_limits(descriptor: PrepareDescriptor) -> str | None:
    if max(descriptor.m, descriptor.k) >= 8 << 32:  # squares of 8 x 8 are counted in 32 bits along a side
        return f"serves dimensions below {8 << 32}"
    return grid_limit_refusal(-(-descriptor.m // SQUARE_SIDE) * -(-descriptor.k // SQUARE_SIDE))


def threads_of_row(descriptor: PrepareDescriptor) -> int:
    """Threads of quantize.cu that a row of a matrix gets."""
    return (
        32 if descriptor.k * descriptor.element.itemsize <= 32 * _ROW_BYTES_OF_A_THREAD else QUANTIZE_THREADS
    )


def _row_limits(descriptor: PrepareDescriptor) -> str | None:
    return grid_limit_refusal(-(-descriptor.m * threads_of_row(descriptor) // QUANTIZE_THREADS))


_PRUNE_OPS = (PrepareOp.PRUNE, PrepareOp.COMPRESS, PrepareOp.PRUNE_COMPRESS, PrepareOp.MASK)
_PACK_OPS = (PrepareOp.PACK, PrepareOp.UNPACK)
_ROUNDING_OPS = (PrepareOp.QUANTIZE, PrepareOp.PRUNE_QUANTIZE, PrepareOp.DEQUANTIZE)
_HOST_OPS = tuple(op for op in PrepareOp if op not in (*_PACK_OPS, *_ROUNDING_OPS))


def _device_row(
    backend: str,
    limits: Callable[[PrepareDescriptor], str | None],
    *ops: PrepareOp,
    elements: tuple[ElementKind, ...] = ELEMENTS,
) -> PrepareEntry:
    return PrepareEntry(backend, backend, Tier.MEMORY, elements=elements, ops=ops, limits=limits)


def _quantize_row(name: str, out: ElementKind, least: tuple[int, int]) -> PrepareEntry:
    return PrepareEntry(
        name,
        "quantize",
        Tier.MEMORY,
        guarantee=quantizing,
        elements=SCORE_ELEMENTS,
        min_compute_capability=least,
        limits=_row_limits,
        ops=(PrepareOp.QUANTIZE,),
        out_element=out,
    )


ENTRIES: tuple[PrepareEntry, ...] = (
    _device_row("prune", partial(_flat_limits, BLOCK_BYTES), *_PRUNE_OPS),
    _device_row("decompress", partial(_flat_limits, inflate.BLOCK_BYTES), PrepareOp.DECOMPRESS),
    _device_row("pack", _pack_limits, *_PACK_OPS, elements=PACKED_ELEMENTS),
    _device_row("tile_prune", _square_limits, PrepareOp.TILE_PRUNE),
    _quantize_row("quantize_fp8", ElementKind.FP8_E4M3, (8, 9)),
    _quantize_row("quantize_s8", ElementKind.S8, (8, 0)),
    PrepareEntry("host", "host", Tier.HOST, ops=_HOST_OPS),
    PrepareEntry("host_pack", "host", Tier.HOST, elements=PACKED_ELEMENTS, ops=_PACK_OPS),
    PrepareEntry(
        "host_quantize",
        "host",
        Tier.HOST,
        guarantee=quantizing,
        elements=SCORE_ELEMENTS,
        ops=_ROUNDING_OPS,
    ),
)
