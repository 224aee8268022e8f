"""What a kernel promises about its numbers, what a caller may require, and the bounds behind both."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from ..vocab import ElementKind, Float64s, MathPrecision, Model


class PrecisionGuarantee(Model):
    """What a kernel promises about its numbers. A promise that no test confirms is not made.

    ``deterministic``: same plan, same inputs, same bits.
    ``bit_stable_on_same_hardware``: also across processes, streams and load, for the same library versions.
    ``batch_invariant``: row i of Y depends on row i of X and on W alone, whatever n and i are.
    ``bit_stable_across_hardware``: the same bits on every device and on the host's strict mode.
    ``nonfinite``: with ``skips_pruned`` an Inf or NaN in X at a pruned position doesn't reach Y;
    with ``propagates`` it does.
    """

    math_precision: MathPrecision
    accumulator: ElementKind
    deterministic: bool
    bit_stable_on_same_hardware: bool
    batch_invariant: bool
    bit_stable_across_hardware: bool
    subnormals: Literal["preserved", "flushed"]
    nonfinite: Literal["skips_pruned", "propagates"]
    unit_roundoff: float = Field(ge=0)
    """Relative error of one step of the accumulation; 0 where integers are summed exactly."""
    terms_per_k: float = Field(gt=0)
    """Steps that can round, for each unit of the reduction length."""
    promoted_every: int | None = None
    """Columns whose sum is added to the others in float32, outside of the tensor cores; None: all are one."""

    def error_bound(self, k: int) -> float:
        """c in ``|y - y_exact| <= c * sum|x||w| + output rounding``, for a reduction of length k.

        k is K for ``forward`` and M for ``dgrad``. The bound is the standard gamma_n = n*u / (1 - n*u)
        (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); infinity where n*u >= 1.
        """
        steps = self.terms_per_k * min(k, self.promoted_every or k) * self.unit_roundoff
        if self.promoted_every:
            steps += -(-k // self.promoted_every) * ElementKind.F32.unit_roundoff
        return steps / (1 - steps) if steps < 1 else float("inf")

    def tolerance(
        self, k: int, exact: Float64s, abs_sum: Float64s, out: ElementKind, alpha: float = 1.0
    ) -> Float64s:
        """The whole allowed error of an ``identity`` epilogue, elementwise, as float64.

        ``exact`` is alpha times the exact product and ``abs_sum`` is sum|x||w|, both float64. Beyond
        ``error_bound`` it holds what rounding costs: of the sum and of alpha to float32, of their product, of
        the result to ``out``, and the underflow of every step.
        """
        f32 = ElementKind.F32
        accumulated = abs(alpha) * (self.error_bound(k) * abs_sum + k * f32.smallest_subnormal)
        value: Float64s = np.abs(exact) + accumulated
        of_alpha = abs(float(np.float32(alpha)) - alpha) / abs(alpha) if alpha else 0.0
        rounding = value * (2 * f32.unit_roundoff + of_alpha + 1.01 * out.unit_roundoff)
        to_integer = 0.5 if out.is_integer else 0.0
        return accumulated + rounding + f32.smallest_subnormal + out.smallest_subnormal + to_integer


class GuaranteeRequirement(Model):
    """A filter on guarantees: only kernels that promise all of this are considered."""

    deterministic: bool = False
    bit_stable_on_same_hardware: bool = False
    batch_invariant: bool = False
    bit_stable_across_hardware: bool = False
    subnormals: Literal["preserved", "flushed"] | None = None
    nonfinite: Literal["skips_pruned", "propagates"] | None = None
    math_precision: MathPrecision | None = None
    accumulator: ElementKind | None = None
    max_error_bound: float | None = Field(default=None, gt=0)
    """Upper limit of ``error_bound`` for the descriptor's reduction length."""

    def unmet(self, guarantee: PrecisionGuarantee, reduction: int) -> str | None:
        """The first requirement that the guarantee fails, in words; None where it meets them all."""
        for name in _FLAGS:
            if getattr(self, name) and not getattr(guarantee, name):
                return f"does not guarantee {name}"
        for name in _VALUES:
            wanted, given = getattr(self, name), getattr(guarantee, name)
            if wanted is not None and wanted != given:
                return f"{name} is {given}, required {wanted}"
        if self.max_error_bound is not None:
            bound = guarantee.error_bound(reduction)
            if bound > self.max_error_bound:
                return f"error_bound({reduction}) is {bound:.3g}, required <= {self.max_error_bound:.3g}"
        return None


_FLAGS = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant", "bit_stable_across_hardware")
_VALUES = ("subnormals", "nonfinite", "math_precision", "accumulator")
