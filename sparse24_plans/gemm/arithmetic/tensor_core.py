"""One step of Hopper's tensor cores: it adds exact products and an accumulator as the hardware does.

The rule for each result is:

1. The exponent of an operand is that of its leading bit, but at least that of its element's smallest normal
   number. The exponent of a product is the sum of its operands' exponents: a product's significand lies in
   [0, 4) and is not normalised. The accumulator is a float32, its exponent at least -126. An addend that is
   zero, be it a product or the accumulator, has the exponent -133.
2. E is the largest exponent of all addends. Each addend is cut toward zero to a multiple of
   2^(E - fraction_bits). The cut addends are added exactly.
3. The sum is cut toward zero to ``result_bits`` fraction bits; one below 2^-126 to a multiple of
   2^(-126 - result_bits). If it reaches 2^128, it becomes an infinity. A zero is +0.
4. The result is NaN if an addend is NaN, if infinities of both signs are added, or if an infinity is
   multiplied with zero. Otherwise, with an infinity among the addends, it is that infinity.

The rule is MMA-Sim's (arXiv 2511.10909, package mmasim 2.1.1) for the dense instructions ``mma`` and
``wgmma`` with f32 results on Hopper. The sparse instructions apply it to the kept products. VENDOR.md lists
what was taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arithmetic.epilogue import IN_STEPS
from ...vocab import FP8, ElementKind, Float64s
from ..descriptor import GemmSparse24Descriptor

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """The constants of an instruction's step."""

    products: int
    """Number of kept products that are added to the accumulator."""
    fraction_bits: int
    """Number of bits of an addend that count, below the largest exponent."""
    result_bits: int
    """Number of fraction bits of the result."""

    @property
    def columns(self) -> int:
        """Number of dense columns of W in a step."""
        return 2 * self.products


STEPS = {
    ElementKind.F16: Step(16, 25, 23),
    ElementKind.BF16: Step(16, 25, 23),
    **dict.fromkeys(FP8, Step(32, 13, 13)),
}
"""Steps of ``mma.sp`` and ``wgmma.sp`` with 32 bytes of kept values, by the element of W."""

ZERO_EXPONENT = -133
"""Exponent of an addend that is zero."""
NO_EXPONENT = -10000
"""Marks a zero operand in :func:`exponents`. Its sum with any other exponent is far below all true ones."""
_MIN_EXPONENT = -126  # of a float32
_BIAS, _FIELD, _FRACTION = 1023, 0x7FF, 52  # of a float64


def named(problem: GemmSparse24Descriptor, arithmetic: str) -> str | None:
    """Return the arithmetic of a GPU kernel, or None if the activation takes approximate functions."""
    return arithmetic if problem.epilogue in IN_STEPS else None


def exponents(values: Float64s, element: ElementKind) -> Array:
    """The exponents of operands, int16; NO_EXPONENT for zeros."""
    least = int(np.frexp(element.smallest_normal)[1]) - 1
    found = np.maximum(_exponent(values), least).astype(np.int16)
    found[values == 0] = NO_EXPONENT
    return found


def add_products(products: Float64s, exponents: Array, accumulator: Float64s, step: Step) -> Float64s:
    """The accumulator after one step: float64 [...] of float32 values.

    ``products`` [step.products, ...] are exact in float64, as are all products of f16, bf16 and fp8.
    ``exponents`` [step.products, ...] are the sums of their factors' :func:`exponents`. ``accumulator`` [...]
    holds float32 values. Missing products count as zeros.
    """
    largest = np.maximum(exponents.max(axis=0), _accumulators_exponent(accumulator))
    has_zero = (exponents.min(axis=0) <= NO_EXPONENT // 2) | (len(products) < step.products)
    largest = np.where(has_zero, np.maximum(largest, ZERO_EXPONENT), largest)
    scale = _power_of_two(step.fraction_bits - largest)
    total: Float64s = np.trunc(products * scale).sum(axis=0)
    total += np.trunc(accumulator * scale)
    total *= _power_of_two(largest - step.fraction_bits)
    found = cut(total, step.result_bits)
    special = (
        products.sum(axis=0) + accumulator
    )  # finite if all addends are: their sum can't overflow float64
    infinite = ~np.isfinite(special)
    if infinite.any():
        found[infinite] = special[infinite]
    return found


def cut(values: Float64s, fraction_bits: int) -> Float64s:
    """Round ``values`` toward zero to ``fraction_bits`` bits and float32's range; zeros become +0."""
    bits = values.view(np.int64) & ~((1 << (_FRACTION - fraction_bits)) - 1)
    found: Float64s = bits.view(np.float64)
    small = np.abs(values) < 2.0**_MIN_EXPONENT
    if small.any():
        unit = 2.0 ** (_MIN_EXPONENT - fraction_bits)
        found[small] = np.trunc(values[small] / unit) * unit
    large = np.abs(found) >= 2.0**128
    if large.any():
        found[large] = np.copysign(np.inf, found[large])
    return found + 0.0


def _accumulators_exponent(accumulator: Float64s) -> Array:
    found = np.maximum(_exponent(accumulator), _MIN_EXPONENT)
    return np.where(accumulator == 0, ZERO_EXPONENT, found)


def _exponent(values: Float64s) -> Array:
    """Exponent of the leading bit; for zero it is below all others."""
    return ((values.view(np.int64) >> _FRACTION) & _FIELD) - _BIAS


def _power_of_two(exponent: Array) -> Float64s:
    power: Float64s = ((exponent.astype(np.int64) + _BIAS) << _FRACTION).view(np.float64)
    return power
