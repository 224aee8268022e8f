"""Which arithmetic a kernel of products names."""

from __future__ import annotations

from ...arithmetic.epilogue import IN_STEPS
from ...plan.arithmetic import EXACT_SUM, Arithmetic
from ..descriptor import GemmSparse24Descriptor


def exact_sum(desc: GemmSparse24Descriptor) -> str | None:
    """Of tensor cores that add products of s8."""
    return EXACT_SUM if desc.epilogue in IN_STEPS else None


def sliced(desc: GemmSparse24Descriptor, slices: int) -> str | None:
    """Of Hopper's tensor cores, K in so many slices."""
    return str(Arithmetic.hopper(desc.element, slices)) if desc.epilogue in IN_STEPS else None


def split(desc: GemmSparse24Descriptor, parts: int, slices: int) -> str | None:
    """Of Hopper's tensor cores, float32 in so many parts and K in so many slices."""
    return str(Arithmetic.split(parts, slices)) if desc.epilogue in IN_STEPS else None


def promoted(desc: GemmSparse24Descriptor) -> str | None:
    """Of Hopper's tensor cores, with sums of fp8 products that leave them."""
    return str(Arithmetic.promoted()) if desc.epilogue in IN_STEPS else None
