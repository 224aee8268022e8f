"""Names of arithmetics: exact sequences of roundings, which give the same bits wherever they are run.

============================ =====================================================================
``fma32_in_order``           one float32 fma a kept position, in increasing order
``exact_sum``                integers, added exactly, the sum rounded to float32 once
``hopper_tc/slices=S``       steps of Hopper's tensor cores over each of S slices of K, folded in order
``hopper_tc_fp8/slices=S``   the same with the steps of fp8
``hopper_tc_fp8/promoted=C`` those steps over every C columns, whose sums are added in order
============================ =====================================================================

What follows the sum is one sequence for all: docs/guarantees.md has it, with the rules of each name. With a
descriptor a name fixes every bit of a result.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidProblemError, shown
from ..vocab import ElementKind

FMA32, EXACT_SUM, HOPPER, HOPPER_FP8 = "fma32_in_order", "exact_sum", "hopper_tc", "hopper_tc_fp8"
MOST_SLICES, PROMOTED_EVERY = 8, 128
FORMS = (
    FMA32,
    EXACT_SUM,
    f"{HOPPER}/slices=1..{MOST_SLICES}",
    f"{HOPPER_FP8}/slices=1..{MOST_SLICES}",
    f"{HOPPER_FP8}/promoted={PROMOTED_EVERY}",
)
"""What there is, for people."""
_ELEMENTS = {
    FMA32: (ElementKind.F32, ElementKind.F16, ElementKind.BF16, ElementKind.FP8_E4M3),
    EXACT_SUM: (ElementKind.S8,),
    HOPPER: (ElementKind.F16, ElementKind.BF16),
    HOPPER_FP8: (ElementKind.FP8_E4M3,),
}


def in_order(element: ElementKind) -> str:
    """The name of a defined order of single products, or of exact sums."""
    return EXACT_SUM if element is ElementKind.S8 else FMA32


class Arithmetic(NamedTuple):
    """A name, read. ``str`` of it is the name."""

    kind: str
    slices: int = 0
    """Of K, for the tensor cores; 0: has none."""
    promoted_every: int = 0
    """Columns whose sum leaves the tensor cores; 0: all of a slice."""

    @classmethod
    def of(cls, name: object) -> Arithmetic:
        """What ``name`` means. Raises InvalidProblemError."""
        if (complaint := complaint_of(name)) is not None:
            raise InvalidProblemError(f"arithmetic: {complaint}")
        return _KNOWN[str(name)]

    @classmethod
    def hopper(cls, element: ElementKind, slices: int) -> Arithmetic:
        """Of tensor cores that sum K in so many slices."""
        return cls(HOPPER_FP8 if element is ElementKind.FP8_E4M3 else HOPPER, slices)

    @classmethod
    def promoted(cls) -> Arithmetic:
        """Of fp8 on tensor cores whose sums are added outside of them."""
        return cls(HOPPER_FP8, 0, PROMOTED_EVERY)

    @property
    def on_tensor_cores(self) -> bool:
        return self.kind in (HOPPER, HOPPER_FP8)

    def takes(self, element: ElementKind) -> bool:
        """Whether it is defined for such operands."""
        return element in _ELEMENTS[self.kind]

    def __str__(self) -> str:
        if self.promoted_every:
            return f"{self.kind}/promoted={self.promoted_every}"
        return f"{self.kind}/slices={self.slices}" if self.slices else self.kind


_KNOWN = {
    str(one): one
    for one in (
        Arithmetic(FMA32),
        Arithmetic(EXACT_SUM),
        *(Arithmetic(kind, slices) for kind in (HOPPER, HOPPER_FP8) for slices in range(1, MOST_SLICES + 1)),
        Arithmetic.promoted(),
    )
}


def complaint_of(name: object) -> str | None:
    """What is wrong with a name, in words, or None."""
    if isinstance(name, str) and name in _KNOWN:
        return None
    return f"expected one of {', '.join(FORMS)}, got {shown(name)}"
